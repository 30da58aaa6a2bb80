"""The tests; `tests.helpers` holds what several of them share."""
