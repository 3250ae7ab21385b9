"""What a run costs: devices by the hour, bytes by the month, bytes that leave.

Prices are list prices and old soon: every one can be given. Storage and egress count gigabytes of 10^9 bytes.
"""

from ingot.theory.term import Term
from ingot.units import format_count, format_usd

GIGABYTE = 10**9
MONTH_DAYS = 365.25 / 12
# Object storage of the largest provider, its first region, standard class, first 50 TB a month; to the internet, first
# 10 TB. List prices as of May 2026.
STORAGE_USD_PER_GB_MONTH = 0.023
EGRESS_USD_PER_GB = 0.09
STORAGE_PRICE_SOURCE = "AWS S3 standard, us-east-1, list price, May 2026"


def device_hours(devices: int, days: float) -> float:
    return devices * days * 24


def device_usd(devices: int, days: float, usd_per_hour: float) -> Term:
    """usd_per_hour: of one of what `devices` counts."""
    hours = device_hours(devices, days)
    usd = hours * usd_per_hour
    formula = f"{devices:,} x {days:,.1f} days x 24 = {format_count(hours)} hours x ${usd_per_hour:g}"
    return Term(usd, f"{formula} = {format_usd(usd)}")


def storage_usd(stored_bytes: float, days: float, usd_per_gb_month: float = STORAGE_USD_PER_GB_MONTH) -> Term:
    gigabytes, months = stored_bytes / GIGABYTE, days / MONTH_DAYS
    usd = gigabytes * months * usd_per_gb_month
    formula = f"{gigabytes:,.0f} GB x {months:.2f} months x ${usd_per_gb_month:g}"
    return Term(usd, f"{formula} = {format_usd(usd)}")


def egress_usd(moved_bytes: float, usd_per_gb: float = EGRESS_USD_PER_GB) -> Term:
    usd = moved_bytes / GIGABYTE * usd_per_gb
    return Term(usd, f"{moved_bytes / GIGABYTE:,.0f} GB x ${usd_per_gb:g} = {format_usd(usd)}")
