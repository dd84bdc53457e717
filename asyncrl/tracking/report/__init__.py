"""The report, its plots and the dashboards."""
