"""The prompt that a command is about."""

from __future__ import annotations

import argparse

from jkv import flags
from jkv.api import jkv_pb2 as pb
from jkv.client import inputs
from jkv.client.args import CachePrefix
from jkv.errors import ConfigError


def prefix_of(args: argparse.Namespace, command: str) -> pb.Prefix:
    """What the flags and the PROMPT of a command name.

    Raises:
        ConfigError: none or several are given, or one cannot be used.
    """
    asked = CachePrefix(**flags.given(CachePrefix, args))
    given = [one for one in (args.prompt, args.token_ids, args.messages) if one is not None]
    if len(given) != 1:
        raise ConfigError(f"{command}: give one of PROMPT (- for stdin), --token-ids and --messages")
    prefix = pb.Prefix(
        cache_salt=inputs.text("--salt", asked.salt or ""), model=inputs.text("--model", asked.model or "")
    )
    if args.prompt is not None:
        prefix.prompt = inputs.text("PROMPT", args.prompt)
    elif args.token_ids is not None:
        prefix.token_ids.ids.extend(inputs.token_ids(args.token_ids))
    else:
        prefix.messages.CopyFrom(inputs.messages(args.messages))
    return prefix
