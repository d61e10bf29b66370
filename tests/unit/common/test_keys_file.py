from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tokenloom.common import keys_file
from tokenloom.common.auth import digest_of, load_api_keys
from tokenloom.common.errors import SetupError
from tokenloom.common.keys_file import MAX_KEYS, Key, Scope, Tenant, parse_keys, read_keys_file

ROOT = Path(__file__).parents[3]
SAMPLE = """
# Who may call, and what each may have. Digests only: printf %s KEY | sha256sum

[[key]]                         # two keys of one tenant, the second for jobs that can wait
sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
tenant = "team-a"

[[key]]
sha256 = "fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9"
tenant = "team-a"
highest_class = 2               # 0, the most urgent, if left out

[[key]]
sha256 = "baa5a0964d3320fbc0c6a922140453c8513ea24ab8fd0577034804a967248096"
tenant = "operations"
scopes = ["inference", "control"]

[tenant.team-a]                 # a tenant without a table has weight 1 and no limits
weight = 2.0                    # share of the engine while others wait
max_running = 8                 # requests that run at once; more wait
max_queued = 64                 # requests that wait; more are answered 429
tokens_per_minute = 60000       # prompt and output; requests beyond it are answered 429
"""
A, B = "a" * 64, "b" * 64
KEY = f'[[key]]\nsha256 = "{A}"\ntenant = "t"\n'


def refusal(text: str) -> str:
    """What is said of a file that is refused."""
    with pytest.raises(SetupError) as caught:
        parse_keys(text, "/etc/keys.toml")
    message = str(caught.value)
    assert message.startswith("keys file /etc/keys.toml: ")
    assert "\n" not in message
    return message


def test_the_sample_says_who_may_have_what() -> None:
    parsed = parse_keys(SAMPLE, "sample")
    assert parsed.keys == (
        Key(digest_of("foo"), "team-a"),
        Key(digest_of("bar"), "team-a", highest_class=2),
        Key(digest_of("baz"), "operations", scopes=frozenset({Scope.INFERENCE, Scope.CONTROL})),
    )
    assert parsed.tenants == (Tenant("operations"), Tenant("team-a", 2.0, 8, 64, 60000))


def test_the_samples_in_the_documentation_are_read() -> None:
    indented = re.search(r"\n\n((?:    .*\n|\n)+)", keys_file.__doc__ or "")
    assert indented is not None
    assert parse_keys(textwrap.dedent(indented[1]), "docstring").keys[0].tenant == "team-a"
    for block in re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        if "[[key]]" in block:
            assert parse_keys(block, "README").keys


@pytest.mark.parametrize(
    ("text", "entry", "field", "form"),
    [
        ("", "", "0 keys", "[[key]]"),
        ("key = 3", "key", "", "[[key]]"),
        ("key = [3]", "key", "", "[[key]]"),
        (f"{KEY}[keys]", "", "'keys'", "[tenant.NAME]"),
        (f"{KEY}tenant = 1\ntenat = 2", "", "no TOML", "overwrite"),
        ('[[key]]\ntenant = "t"', "key 1", "sha256 is missing", "64 hexadecimal digits"),
        ('[[key]]\nsha256 = "ab"\ntenant = "t"', "key 1", "sha256", "64 hexadecimal digits"),
        (f'[[key]]\nsha256 = "{"g" * 64}"\ntenant = "t"', "key 1", "sha256", "64 hexadecimal digits"),
        (f'[[key]]\nsha256 = "{A[:-1]} "\ntenant = "t"', "key 1", "sha256", "64 hexadecimal digits"),
        ("[[key]]\nsha256 = 1\ntenant = 't'", "key 1", "sha256", "64 hexadecimal digits"),
        (f'[[key]]\nsha256 = "{A}"', "key 1", "tenant is missing", "1 to 64 letters"),
        (f'[[key]]\nsha256 = "{A}"\ntenant = ""', "key 1", "tenant", "1 to 64 letters"),
        (f'[[key]]\nsha256 = "{A}"\ntenant = "a/b"', "key 1", "tenant", "1 to 64 letters"),
        (f'[[key]]\nsha256 = "{A}"\ntenant = 7', "key 1", "tenant", "1 to 64 letters"),
        (f"{KEY}highest_class = -1", "key 1", "highest_class: -1", "from 0 to 4294967295"),
        (f"{KEY}highest_class = true", "key 1", "highest_class: True", "from 0"),
        (f"{KEY}highest_class = 1.0", "key 1", "highest_class: 1.0", "from 0"),
        (f"{KEY}scopes = []", "key 1", "scopes: []", '"inference" and "control"'),
        (f'{KEY}scopes = "inference"', "key 1", "scopes", '"inference" and "control"'),
        (f'{KEY}scopes = ["root"]', "key 1", "scopes: ['root']", '"inference" and "control"'),
        (f"{KEY}scopes = [[]]", "key 1", "scopes: [[]]", '"inference" and "control"'),
        (f"{KEY}weight = 2", "key 1", "'weight'", "sha256, tenant, highest_class, scopes"),
        (f"{KEY}{KEY}", "key 2", "sha256: the same as that of key 1", "no other key"),
        (f"{KEY}{KEY.replace('aaa', 'AAA')}", "key 2", "sha256: the same", "no other key"),
        (f"{KEY}[tenant.u]", "tenant u", "no key names it", "[[key]]"),
        (f"{KEY}[tenant]\nt = 3", "tenant t", "", "[tenant.t]"),
        (f'{KEY}[tenant."a b"]', "tenant 'a b'", "", "1 to 64 letters"),
        (f"{KEY}[[tenant]]\nweight = 1", "tenant", "", "[tenant.NAME]"),
        (f"{KEY}[tenant.t]\nmax_runing = 1", "tenant t", "'max_runing'", "weight, max_running, max_queued"),
        (f"{KEY}[tenant.t]\nweight = 0", "tenant t", "weight: 0", "from 0.001 to 1000"),
        (f"{KEY}[tenant.t]\nweight = -1.5", "tenant t", "weight: -1.5", "from 0.001"),
        (f"{KEY}[tenant.t]\nweight = nan", "tenant t", "weight: nan", "from 0.001"),
        (f"{KEY}[tenant.t]\nweight = inf", "tenant t", "weight: inf", "from 0.001"),
        (f"{KEY}[tenant.t]\nweight = true", "tenant t", "weight: True", "from 0.001"),
        (f"{KEY}[tenant.t]\nweight = '2'", "tenant t", "weight: '2'", "from 0.001"),
        (f"{KEY}[tenant.t]\nmax_running = 0", "tenant t", "max_running: 0", "from 1"),
        (f"{KEY}[tenant.t]\nmax_queued = 1.5", "tenant t", "max_queued: 1.5", "from 1"),
        (f"{KEY}[tenant.t]\ntokens_per_minute = 4294967296", "tenant t", "tokens_per_minute", "to 4294967295"),
        (f"{KEY}[tenant.t]\nmax_queued = false", "tenant t", "max_queued: False", "from 1"),
        ("[[key]", "", "no TOML", "line 1"),
    ],
)
def test_a_fault_is_told_with_entry_field_and_accepted_form(text: str, entry: str, field: str, form: str) -> None:
    message = refusal(text)
    assert entry in message
    assert field in message
    assert form.lower() in message.lower()


def test_a_key_in_place_of_its_digest_is_not_quoted() -> None:
    assert "hunter2" not in refusal('[[key]]\nsha256 = "hunter2"\ntenant = "t"')


def test_a_look_up_compares_so_many_keys_and_no_more() -> None:
    keys = "".join(f'[[key]]\nsha256 = "{number:064x}"\ntenant = "t"\n' for number in range(MAX_KEYS + 1))
    assert f"expected 1 to {MAX_KEYS}" in refusal(keys)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(SetupError, match=r"keys\.toml: No such file"):
        read_keys_file(str(path))
    path.write_bytes(b'[[key]]\ntenant = "\xff"')
    with pytest.raises(SetupError, match=r"keys\.toml: not UTF-8"):
        read_keys_file(str(path))
    with pytest.raises(SetupError, match="directory"):
        read_keys_file(str(tmp_path))
    with pytest.raises(SetupError, match="larger than"):
        read_keys_file("/dev/zero")


def test_keys_of_the_file_stand_beside_those_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(SAMPLE)
    keys = load_api_keys(["plain", "plain"], str(path))
    plain = keys.check(digest_of("plain"))
    listed = keys.check(digest_of("bar"))
    assert plain is not None
    assert plain.tenant == digest_of("plain").hex()[:16]
    assert (plain.highest_class, plain.scopes) == (0, frozenset({Scope.INFERENCE}))
    assert listed == Key(digest_of("bar"), "team-a", highest_class=2)
    assert {tenant.name for tenant in keys.tenants} == {plain.tenant, "team-a", "operations"}
    with pytest.raises(SetupError, match="tenant team-a is also given by --api-key"):
        load_api_keys(["foo"], str(path))


def test_a_stage_without_keys_is_open() -> None:
    assert load_api_keys([]).is_open
    assert not load_api_keys(["a"]).is_open
