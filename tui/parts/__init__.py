"""Parts that several screens use: findings, running work, bars, plots, tables of numbers."""
