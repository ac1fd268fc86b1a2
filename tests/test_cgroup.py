"""CPU quotas of the process's own cgroup and of those around it."""

import pytest

from gdn import _core


def quota(tmp_path, membership, files):
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return _core.within_quota(1000, str(tmp_path / "root"), str(tmp_path / "membership"))


@pytest.mark.parametrize("membership, files, cpus", [
    ("0::/\n", {}, None),
    ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
    ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 3),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
    ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "700000 100000\n"}, 2),
    ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, None),
    ("0::/../other\n", {"cpu.max": "400000 100000\n"}, 4),
    ("0::/a:b\n", {"a:b/cpu.max": "200000 100000\n"}, 2),
    ("5:cpuset:/x\n4:cpu,cpuacct:/s/t\n0::/\n",
     {"cpu/s/t/cpu.cfs_quota_us": "150000\n", "cpu/s/t/cpu.cfs_period_us": "100000\n"}, 2),
    ("4:cpu,cpuacct:/s\n", {"cpu/s/cpu.cfs_quota_us": "-1\n", "cpu/s/cpu.cfs_period_us": "100000\n"}, None),
    ("0::/\n", {"cpu.max": "max 100000\n", "cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ("not a membership\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "200000 0\n"}, None),
])
def test_quota(tmp_path, membership, files, cpus):
    assert quota(tmp_path, membership, files) == (cpus or 1000)


def test_no_membership_file(tmp_path):
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert _core.within_quota(8, str(tmp_path), str(tmp_path / "absent")) == 2
