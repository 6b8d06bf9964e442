"""Which route a method and a path lead to."""

import pytest

from enginery.serve.refusals import NotFoundError
from enginery.serve.routes.table import route_table
from enginery.serve.routing import MethodError, Operation, Route, Table

TABLE = route_table()


@pytest.mark.parametrize(
    ("method", "path", "pattern", "values"),
    [
        ("POST", "/embed", "/embed", {}),
        ("GET", "/", "/", {}),
        ("POST", "/predict", "/predict", {}),
        ("POST", "/predict/mood", "/predict/{model}", {"model": "mood"}),
        ("POST", "/v2/models/m/infer", "/v2/models/{model}/infer", {"model": "m"}),
        ("GET", "/v2/models/m/versions/1", "/v2/models/{model}/versions/{version}",
         {"model": "m", "version": "1"}),
        ("GET", "/v1/models/a/b", "/v1/models/{model*}", {"model": "a/b"}),
        ("GET", "/v2/health/ready", "/v2/health/ready", {}),
        ("POST", "/embed/", "/embed", {}),
        ("HEAD", "/health", "/health", {}),
        ("POST", "/predict/модель", "/predict/{model}", {"model": "модель"}),
    ],
)  # fmt: skip
def test_path_leads_to_its_route(method, path, pattern, values):
    route, found = TABLE.find(method, path)
    assert (route.pattern, found) == (pattern, values)


def test_get_and_post_of_one_path_are_two_routes():
    assert TABLE.find("GET", "/")[0].family == "admin"
    assert TABLE.find("POST", "/")[0].family == "tei"


@pytest.mark.parametrize(
    "path", ["/embedd", "/v2/models", "/v2/models//infer", "//", "*", "", "/é"]
)
def test_unknown_path_is_not_found(path):
    with pytest.raises(NotFoundError):
        TABLE.find("GET", path)


def test_not_found_names_the_nearest_route():
    with pytest.raises(NotFoundError, match=r"no route '/embedd'; did you mean '/embed'\?"):
        TABLE.find("POST", "/embedd")


def test_path_of_a_megabyte_is_not_compared_with_all_routes():
    with pytest.raises(NotFoundError) as caught:
        TABLE.find("POST", "/embe" + "d" * 1_000_000)
    assert len(caught.value.message) < 200


def test_wrong_method_names_the_right_ones():
    with pytest.raises(MethodError, match="does not answer 'PUT', expected OPTIONS or POST") as e:
        TABLE.find("PUT", "/embed")
    assert e.value.allowed == ("OPTIONS", "POST")
    assert TABLE.allowed("/") == ("GET", "HEAD", "OPTIONS", "POST")


@pytest.mark.parametrize(
    ("path", "family"),
    [("/v2/nowhere", "oip"), ("/v1/nowhere", "openai"), ("/v1/embeddings", "openai"),
     ("/embed", "tei"), ("/predict/x", "plain"), ("/nowhere", "plain"), ("/metrics", "admin")],
)  # fmt: skip
def test_family_of_any_path(path, family):
    assert TABLE.family(path) == family


def test_two_handlers_of_one_route_are_a_mistake():
    async def handler(call):
        raise NotImplementedError

    route = Route("GET", "/x", handler, "plain", Operation("x"))
    with pytest.raises(ValueError, match="two handlers answer GET /x"):
        Table([route, route])
