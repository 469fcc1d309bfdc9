"""What the benchmarks share: models, tools to compare, timing, memory, tables and a chart."""
