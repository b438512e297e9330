"""Errors, argument checks, linear algebra, masked rows, frozen results: what every other package
stands on."""
