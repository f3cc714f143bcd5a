"""The size from which the copy engine beats the transfer kernel."""

__all__ = ["MIN_COPY_BYTES"]

#: Bytes that one call of the copy engine should move, on average, to be worth its fixed cost.
#: An estimate (some microseconds a call at 55 GB/s against 37 GB/s by kernel), not a measurement:
#: ``make gpu-check`` measures it.
MIN_COPY_BYTES = 256 * 1024
