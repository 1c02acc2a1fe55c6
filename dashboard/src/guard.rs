//! Who may ask: on this machine everybody who comes from the page itself, elsewhere those with the token.

use axum::{
    extract::{Request, State},
    http::{header, HeaderMap, HeaderName, HeaderValue, Method, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
    Json,
};
use serde_json::json;
use std::{net::IpAddr, sync::Arc};
use subtle::ConstantTimeEq;

/// The page's own requests that change something have this: another site's can't, without asking first.
const OWN: HeaderName = HeaderName::from_static("x-duroxide-page");

/// What a request must show.
pub(crate) struct Guard {
    token: Option<String>,
}

impl Guard {
    pub(crate) fn new(token: Option<String>) -> Self {
        Self { token }
    }

    /// Why a request is refused.
    fn refuses(&self, method: &Method, headers: &HeaderMap) -> Option<(StatusCode, &'static str)> {
        match &self.token {
            Some(token) if !has_token(headers, token) => {
                return Some((
                    StatusCode::UNAUTHORIZED,
                    "the token is missing or wrong: open the page with #token=… behind its address",
                ));
            }
            // A name of somebody else's that leads here would let their pages read this one.
            None if !names_this_machine(headers) => {
                return Some((
                    StatusCode::FORBIDDEN,
                    "this page is for this machine: open it as 127.0.0.1 or localhost",
                ));
            }
            _ => {}
        }
        let changes = *method != Method::GET && *method != Method::HEAD;
        (changes && !headers.contains_key(OWN)).then_some((StatusCode::FORBIDDEN, "this did not come from the page"))
    }
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
    bool::from(given.as_bytes().ct_eq(token.as_bytes()))
}

fn names_this_machine(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

pub(crate) async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    match guard.refuses(request.method(), request.headers()) {
        Some((status, says)) => (status, Json(json!({ "error": says }))).into_response(),
        None => next.run(request).await,
    }
}

/// Nothing from elsewhere, nothing inside others' pages, nothing kept.
pub(crate) async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                  base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap())).collect()
    }

    #[test]
    fn without_a_token_only_this_machine_asks_and_by_its_own_name() {
        let guard = Guard::new(None);
        let refused = |host: &str| guard.refuses(&Method::GET, &headers(&[(header::HOST, host)])).is_some();
        for host in ["localhost", "localhost:8090", "127.0.0.1:8090", "127.9.9.9", "[::1]:8090"] {
            assert!(!refused(host), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8090", "", "localhost.evil.example:80"] {
            assert!(refused(host), "{host}");
        }
    }

    #[test]
    fn with_a_token_nobody_asks_without_it() {
        let guard = Guard::new(Some("secret".to_owned()));
        let status =
            |pairs: &[(HeaderName, &str)]| guard.refuses(&Method::GET, &headers(pairs)).map(|(status, _)| status);
        assert_eq!(status(&[(header::AUTHORIZATION, "Bearer secret")]), None);
        for given in ["Bearer secre", "Bearer secrets", "secret", "Basic secret", "Bearer "] {
            assert_eq!(status(&[(header::AUTHORIZATION, given)]), Some(StatusCode::UNAUTHORIZED), "{given}");
        }
        assert_eq!(status(&[(header::HOST, "localhost")]), Some(StatusCode::UNAUTHORIZED));
    }

    #[test]
    fn another_page_changes_nothing() {
        let guard = Guard::new(None);
        let here = (header::HOST, "localhost");
        assert!(guard.refuses(&Method::POST, &headers(std::slice::from_ref(&here))).is_some());
        assert!(guard.refuses(&Method::POST, &headers(&[here, (OWN, "1")])).is_none());
    }
}
