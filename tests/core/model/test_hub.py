"""Requests to the Hub without an answer, with each HTTP client that huggingface_hub has had."""

import socket

import httpx
import pytest
import requests
from huggingface_hub import constants, errors

from enginery.core.model.hub import HubUnreachableError, hub_requests


def failing(client):
    """Raise what the client raises for a name that does not exist, as it raises it."""
    try:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    except OSError as error:
        kind = getattr(client, "ConnectError", None) or requests.ConnectionError
        raise kind("HTTPSConnectionPool(host='hub', port=443): Max retries") from error


@pytest.fixture(params=[requests, httpx], ids=["requests", "httpx"])
def client(request, monkeypatch):
    """The HTTP client that huggingface_hub's own error derives from."""

    class HubError(request.param.HTTPError, OSError):
        response = None

    HubError.__module__ = "huggingface_hub.errors"
    monkeypatch.setattr(errors, "HfHubHTTPError", HubError)
    return request.param


def test_hub_that_gives_no_answer_is_an_os_error_with_its_address(client):
    with pytest.raises(HubUnreachableError) as caught, hub_requests():
        failing(client)
    assert isinstance(caught.value, OSError)
    assert str(caught.value) == f"{constants.ENDPOINT}: Name or service not known"


def test_timeout_and_invalid_address_are_no_answer(client):
    timeout = getattr(client, "ConnectTimeout", None) or requests.Timeout
    invalid = getattr(client, "InvalidURL", None) or requests.exceptions.InvalidURL
    for kind in (timeout, invalid):
        with pytest.raises(HubUnreachableError, match="too slow"), hub_requests():
            raise kind("too slow\nand more")


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, errors.OfflineModeIsEnabled])
def test_other_errors_stay_what_they_are(client, error):
    with pytest.raises(error, match="text"), hub_requests():
        raise error("text")


def test_error_in_an_answer_stays_what_it_is(client):
    with pytest.raises(errors.HfHubHTTPError, match="404"), hub_requests():
        raise errors.HfHubHTTPError("404")


def test_answer_that_the_client_itself_rejects_stays_what_it_is(client):
    error = client.HTTPError("418")
    error.response = object()
    with pytest.raises(client.HTTPError, match="418"), hub_requests():
        raise error
