"""Files for Prometheus and Grafana: rules.yml (recording and alert rules) and dashboard.json."""
