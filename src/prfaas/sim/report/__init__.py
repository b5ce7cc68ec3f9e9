"""Reports, time series and traces of runs."""
