"""What several tests share: builders, checks, small fakes."""
