"""Reporting: results as tables, plots and parts of a page, for instruments and commands."""
