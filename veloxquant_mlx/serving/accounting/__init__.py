"""Accounting: what the plain KV caches of a program take up, charged to a pool as to an account.

    accounting    the whole of it
    sequences, batches, entries    listen to the events: whose caches and rows are
    admission     --enforce: who is let in
    books         one lock, and when it is settled
    holdings      the live caches, and what each takes up
    ledger        whose that is, and what the pool was charged for it
    account       one owner
    settings      --pool

docs/serving.md says what is charged and what is not.
"""

from __future__ import annotations

from veloxquant_mlx.serving.accounting.accounting import Accounting, account_for
from veloxquant_mlx.serving.accounting.settings import PoolSettings

__all__ = ["Accounting", "PoolSettings", "account_for"]
