"""The cluster's front door: who is in it, what each engine has cached, and which engine a request goes to."""

from __future__ import annotations
