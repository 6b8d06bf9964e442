"""A page of another origin may call the server only if an option names the origin."""

import pytest

from enginery.core.errors import OptionError
from enginery.serve.config import ServeConfig, check_options
from tests.serve.doubles import application, ask

PAGE = "https://app.example"


def asked(app, origin):
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return ask(app, "OPTIONS", "/embed", headers=headers)


def test_a_named_origin_may_call_with_a_key():
    config = ServeConfig(access_log="off", cors_origins=(PAGE,))
    app = application(config=config, keys=(b"s3cret",))
    response = asked(app, PAGE)
    assert response.status == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in asked(app, "https://other.example").headers
    refused = ask(app, "POST", "/embed", {"inputs": "warm"}, headers={"origin": PAGE})
    assert refused.status == 401, "the key is still needed"
    assert refused.headers["access-control-allow-origin"] == PAGE, "the page can read why"


def test_every_origin_may_call_if_all_are_named():
    app = application(config=ServeConfig(access_log="off", cors_origins=("*",)))
    assert asked(app, PAGE).headers["access-control-allow-origin"] in ("*", PAGE)


def test_no_origin_may_call_by_default():
    app = application()
    assert "access-control-allow-origin" not in asked(app, PAGE).headers
    answer = ask(app, "GET", "/health/live", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/page", "ftp://a", ""])
def test_what_is_no_origin_is_an_error(origin):
    with pytest.raises(OptionError, match="'cors_origins' is"):
        check_options(ServeConfig(cors_origins=(origin,)))
