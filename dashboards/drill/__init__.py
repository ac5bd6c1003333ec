"""The incident drill: incidents acted out on the real allocator, and what the alert rules say of them.

`make drill`, or `python -m dashboards.drill`. A scenario plays hours of load in seconds: a virtual
clock (`clock`) stands in for that of the process, a `stage.Stage` steps it from event to event,
pools, storages and hooks are the real ones, and every 15 s the real Prometheus collector is read as
a scraper would. What was read becomes a promtool rule test; promtool says when which alert fires.

    python -m dashboards.drill [NAME...] [--alerts FILE] [--keep DIR]
    python -m dashboards.drill --openmetrics DIR [--end SECONDS] [NAME...]

`--keep DIR` leaves the rule tests there, for `promtool test rules DIR/*.yaml`.

`--openmetrics DIR` writes, instead of judging, all series of each scenario to `DIR/<name>.om`, with
the last scrape at `--end` seconds since the epoch (default: now, rounded down to a minute). Into a
Prometheus that is not running yet::

    for file in DIR/*.om; do promtool tsdb create-blocks-from openmetrics "$file" DATA; done
    prometheus --storage.tsdb.path=DATA --storage.tsdb.retention.time=5y --config.file=...

Each scenario has an `instance` of its own (its name), so that all of them go into one DATA, where
the boards' variable of that name tells them apart.
"""
