"""Where constants come from: the catalog's sources, a profile's, a file's."""

from pathlib import Path

import pytest

from costmodels import ClusterError, known_kinds, origins

PROFILE = """
[cluster]
device = "h100"
devices_per_node = 8
[profile]
device_name = "NVIDIA H100"
date = "2026-11-26T06:39:13+00:00"
kept = ["device.overlap", "inter_node.latency_s"]
[device]
memory_bytes_per_s = 2.7e12
convolution_efficiency = 0.5
[host]
latency_s = 1e-5
efficiency = 0.9
bytes_per_s = 5e10
[inter_node]
bytes_per_s = 4.7e10
"""


@pytest.mark.parametrize("kind", known_kinds())
def test_every_kind_says_what_it_assumes(kind: str) -> None:
    found = origins(f"{kind}:2")
    assert found.profile == "" and found.given == () and found.kept == ()
    assert len(set(found.assumed)) == len(found.assumed) > 0
    assert str(found).startswith("published; assumed: ")


def test_a_kind_that_names_another_has_its_sources() -> None:
    assert "overlap of collectives" in origins("h200:8").assumed
    assert "rate of products" not in origins("h100:8").assumed  # a fit of published runs


def test_a_profile_measured_what_it_has_and_does_not_keep(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(PROFILE)
    for text in (str(path), f"{path}:8x2"):
        found = origins(text)
        assert found.profile == "NVIDIA H100, 2026-11-26"
        assert "rate of convolutions" not in found.assumed  # measured
        assert "link to the host" not in found.assumed
        assert "overlap of collectives" in found.assumed  # kept, and assumed there
        assert found.kept == ("network between nodes",)
        assert str(found).startswith("measured on NVIDIA H100, 2026-11-26; published: network")


def test_a_file_that_is_no_profile_gives_constants(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.replace("[profile]", "[nothing]").split("[nothing]")[0])
    assert origins(str(path)).given == ()
    with path.open("a") as file:
        file.write("[device]\noverlap = 0.5\n[peak_flops_per_s]\nbfloat16 = 1e15\n")
    found = origins(str(path))
    assert found.given == ("overlap of collectives", "peak of bfloat16")
    assert "from the file: overlap of collectives" in str(found)
    with pytest.raises(ClusterError, match="cannot read"):
        origins(str(tmp_path / "none.toml"))
