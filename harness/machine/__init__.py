"""This machine and this checkout: devices, kernel calls, code versions, temporary folders. No torch."""
