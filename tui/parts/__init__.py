"""What several screens are put together from: findings, running work, bars, plots, tables of numbers."""
