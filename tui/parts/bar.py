"""A bar of one line."""


def bar(width: int, share: float, *, plain: bool) -> str:
    """`share` of 0 to 1."""
    full = round(max(0.0, min(1.0, share)) * width)
    return f"[{'#' * full}{'.' * (width - full)}]" if plain else "█" * full + "░" * (width - full)
