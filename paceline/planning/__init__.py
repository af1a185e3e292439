"""Forecasts of how schemes scale on machines that are not there: `paceline.plan`."""
