from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv import flags
from jkv.config import ServeConfig, parse_config, parse_gib
from jkv.errors import ConfigError
from jkv.flags import flag


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("1.5", 1.5),
        ("2GiB", 2.0),
        ("512MiB", 0.5),
        ("512 mib", 0.5),
        ("1TiB", 1024.0),
        (".25", 0.25),
        ("3", 3.0),
    ],
)
def test_sizes_are_gib_unless_they_say_otherwise(text: str, gib: float) -> None:
    assert parse_gib(text) == gib


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1GB", "1,5", "nan", "1e3", "9" * 400])
def test_sizes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_gib(text)


@given(st.integers(1, 2**40))
def test_l1_bytes_are_exact_in_mib(mib: int) -> None:
    config = ServeConfig(l1_gib=parse_gib(f"{mib}MiB"))
    assert config.l1_bytes == mib * 2**20


def test_every_default_is_valid_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config([])
    assert (config.page_size, config.max_num_seqs, config.max_mixed_tokens) == (64, 16, 64)
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--help"])
    assert exit_info.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ServeConfig):
        assert f"--{field.name.replace('_', '-')}" in help_text
    assert help_text.count("(default: ") == len(dataclasses.fields(ServeConfig))


def test_instance_ids_differ_between_processes() -> None:
    assert parse_config([]).instance_id != parse_config([]).instance_id


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--page-size", "48"], ["--page-size 48", "power of two from 8 to 256"]),
        (["--page-size", "4"], ["--page-size 4", "from 8 to 256"]),
        (["--page-size", "many"], ["--page-size many", "expected an integer"]),
        (["--dtype", "float16"], ["--dtype float16", "auto, float32, bfloat16"]),
        (["--l1-gib", "2GB"], ["--l1-gib 2GB", "512MiB"]),
        (["--l1-gib", "0"], ["--l1-gib 0", "greater than 0"]),
        (["--l1-gib", "1", "--l1-pages", "9"], ["--l1-gib", "--l1-pages", "not both"]),
        (["--kv-dtype", "int4"], ["--kv-dtype int4", "auto, float32, bfloat16, int8"]),
        (["--l2-gib", "-1"], ["--l2-gib -1", "512MiB"]),
        (["--l3-dir", "/x", "--l3-gib", "0MiB"], ["--l3-gib 0", "greater than 0"]),
        (["--l3-dir", " "], ["--l3-dir ' '", "empty"]),
        (["--l3-dir", "/x", "--l3-owner", "../other"], ["--l3-owner '../other'", "letters, digits"]),
        (["--l3-dir", "/x", "--l3-owner", ".."], ["--l3-owner '..'", "not starting with '.'"]),
        (["--l3-dir", "/x", "--l3-min-tokens", "-1"], ["--l3-min-tokens -1", "0 or more"]),
        (["--l3-dir", "/x", "--l3-admission", "never"], ["--l3-admission never", "always, second-use"]),
        (["--l3-dir", "/x", "--l3-write-mib-per-s", "0"], ["--l3-write-mib-per-s 0", "greater than 0"]),
        (["--l3-dir", "/x", "--l3-daily-write-gib", "0"], ["--l3-daily-write-gib 0", "greater than 0"]),
        (["--l3-dir", "/x", "--l3-daily-write-gib", "1GB"], ["--l3-daily-write-gib 1GB", "512MiB"]),
        (["--l3-gib", "512MiB"], ["--l3-gib 0.5", "needs --l3-dir"]),
        (["--l3-sync"], ["--l3-sync: needs --l3-dir"]),
        (["--l3-owner", "a"], ["--l3-owner a", "needs --l3-dir"]),
        (["--l3-min-tokens", "64"], ["--l3-min-tokens 64", "needs --l3-dir"]),
        (["--write-policy", "write-around"], ["--write-policy write-around", "write-through-selective"]),
        (["--load-policy", "never"], ["--load-policy never", "auto, always"]),
        (["--load-timeout", "0"], ["--load-timeout 0", "greater than 0"]),
        (["--load-timeout", "inf"], ["--load-timeout inf", "finite"]),
        (["--max-mixed-tokens", "600"], ["--max-mixed-tokens 600", "--max-batched-tokens 512"]),
        (["--grpc-port", "70000"], ["--grpc-port 70000", "from 0 to 65535"]),
        (["--drain-timeout", "nan"], ["--drain-timeout nan", "0 or more"]),
        (["--drain-timeout", "-1"], ["--drain-timeout -1.0", "0 or more"]),
        (["--max-queue", "0"], ["--max-queue 0", "1 or more"]),
        (["--instance-id", "a b"], ["--instance-id 'a b'", "letters"]),
        (["--tp", "0"], ["--tp 0", "1 or more"]),
        (["--tp", "2", "--num-processes", "2"], ["--num-processes 2", "need --coordinator"]),
        (["--coordinator", "h:1"], ["--num-processes 1", "one has none"]),
        (["--tp", "2", "--num-processes", "2", "--coordinator", "h"], ["--coordinator 'h'", "HOST:PORT"]),
        (
            ["--tp", "2", "--num-processes", "2", "--coordinator", "h:1,g:1"],
            ["--coordinator h:1,g:1", "one HOST:PORT"],
        ),
        (
            ["--tp", "2", "--num-processes", "2", "--coordinator", "h:1", "--process-id", "2"],
            ["--process-id 2", "less than"],
        ),
        (["--tp", "3", "--num-processes", "2", "--coordinator", "h:1"], ["--tp 3", "multiple"]),
        (["--model", ""], ["--model ''", "empty"]),
        (["--served-model-name", " "], ["--served-model-name ' '", "empty"]),
    ],
)
def test_errors_name_the_flag_its_value_and_what_is_allowed(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(argv)
    for word in words:
        assert word in str(error.value)


def test_lower_tiers_are_off_or_sized_in_bytes() -> None:
    config = parse_config([])
    assert (config.l2_bytes, config.l3_bytes, config.l3_daily_write_bytes) == (2 * 2**30, 0, None)
    assert parse_config(["--l2-gib", "0"]).l2_bytes == 0
    argv = [
        "--l3-dir",
        "/x",
        "--l3-gib",
        "512MiB",
        "--l3-write-mib-per-s",
        "1.5",
        "--l3-daily-write-gib",
        "1",
    ]
    config = parse_config(argv)
    assert (config.l3_bytes, config.l3_write_bytes_per_s) == (2**29, 1.5 * 2**20)
    assert config.l3_daily_write_bytes == 2**30


def test_unknown_and_abbreviated_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--pagesize", "64"], ["--page", "64"]):
        with pytest.raises(SystemExit) as exit_info:
            parse_config(argv)
        assert exit_info.value.code == 2
        assert argv[0] in capsys.readouterr().err


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return str(path)


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, 'page-size = 32\nmax-queue = 7\nl1-gib = "512MiB"\nbatch-invariant = true\n')
    config = parse_config(["--config", path, "--page-size", "128", "--no-batch-invariant"])
    assert (config.page_size, config.max_queue, config.l1_gib) == (128, 7, 0.5)
    assert config.batch_invariant is False


def test_a_flag_replaces_its_exclusive_partner_in_the_file(tmp_path: Path) -> None:
    config = parse_config(["--config", _file(tmp_path, "l1-gib = 2"), "--l1-pages", "9"])
    assert (config.l1_gib, config.l1_pages) == (None, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page_size = 64", ["unknown key 'page_size'", "'page-size'"]),
        ("zzz = 64", ["unknown key 'zzz'", "known keys", "page-size"]),
        ('page-size = "64"', ["page-size = '64'", "integer, without quotes"]),
        ("page-size = 64.0", ["page-size = 64.0", "integer"]),
        ("page-size = true", ["page-size = True", "integer"]),
        ("batch-invariant = 1", ["batch-invariant = 1", "true or false"]),
        ('batch-invariant = "true"', ["batch-invariant = 'true'", "true or false"]),
        ("l1-gib = true", ["l1-gib = True", "number"]),
        ("host = 1", ["host = 1", "string"]),
        ("[server]\nhost = 'a'", ["unknown key 'server'"]),
        ("page-size = ", ["not valid TOML"]),
    ],
)
def test_file_errors_name_the_file_and_the_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", path])
    for word in [*words, path]:
        assert word in str(error.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        parse_config(["--config", str(tmp_path / "absent.toml")])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse_config(["--config", str(tmp_path / "binary.toml")])


@dataclass(frozen=True, kw_only=True)
class _Repeated:
    engine: tuple[str, ...] = flag((), group="g", help="100% of them")
    weight: tuple[float, ...] = flag((), group="g", help="w", minimum=0)

    def __post_init__(self) -> None:
        flags.check(self)


def test_repeated_flags_gather_and_are_each_checked(tmp_path: Path) -> None:
    parsed = flags.parse(
        _Repeated, ["--engine", "a", "--engine", "b", "--weight", "2"], prog="x", description=""
    )
    assert parsed == _Repeated(engine=("a", "b"), weight=(2.0,))
    path = _file(tmp_path, 'engine = ["a", "b"]\nweight = [1, 2.5]')
    assert flags.parse(_Repeated, ["--config", path], prog="x", description="").weight == (1.0, 2.5)
    with pytest.raises(ConfigError, match="--weight -1"):
        flags.parse(_Repeated, ["--weight", "3", "--weight", "-1"], prog="x", description="")
    with pytest.raises(ConfigError, match="expected an array"):
        flags.parse(_Repeated, ["--config", _file(tmp_path, 'engine = "a"')], prog="x", description="")
