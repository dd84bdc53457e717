import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_cpus


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"launch\.cpus\.actor is .*core 9999"):
        check_cpus(Config(launch={"cpus": {"actor": [9999]}}))


def test_a_role_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="'trainer'"):
        check_cpus(Config(launch={"cpus": {"trainer": [0]}}))
