"""Exported drafters in the engines that they are exported to."""
