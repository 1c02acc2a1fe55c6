//! Access control. Without a token the server answers requests from this machine only. With a token every request
//! for data needs it.

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

/// The header of every change from the dashboard. A page of another site cannot send it without a preflight request.
const CHANGE_HEADER: HeaderName = HeaderName::from_static("x-duroxide-dashboard");

/// The conditions that a request must meet.
pub(crate) struct Guard {
    token: Option<String>,
}

impl Guard {
    pub(crate) fn new(token: Option<String>) -> Self {
        Self { token }
    }

    /// The status and the message of a refusal; `None` if the request is allowed.
    fn refusal(&self, method: &Method, headers: &HeaderMap) -> Option<(StatusCode, &'static str)> {
        match &self.token {
            Some(token) if !has_token(headers, token) => {
                return Some((
                    StatusCode::UNAUTHORIZED,
                    "the token is missing or wrong: open the dashboard with #token=… behind its address",
                ));
            }
            // A foreign domain name that resolves to this machine would let a foreign page read the dashboard.
            None if !is_for_loopback(headers) => {
                return Some((
                    StatusCode::FORBIDDEN,
                    "this dashboard is for this machine only: open it as 127.0.0.1 or localhost",
                ));
            }
            _ => {}
        }
        let is_change = *method != Method::GET && *method != Method::HEAD;
        (is_change && !headers.contains_key(CHANGE_HEADER))
            .then_some((StatusCode::FORBIDDEN, "the request did not come from the dashboard"))
    }
}

fn has_token(headers: &HeaderMap, token: &str) -> bool {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
    bool::from(given.as_bytes().ct_eq(token.as_bytes()))
}

fn is_for_loopback(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

pub(crate) async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    match guard.refusal(request.method(), request.headers()) {
        Some((status, message)) => (status, Json(json!({ "error": message }))).into_response(),
        None => next.run(request).await,
    }
}

/// Adds headers that forbid foreign content, embedding in other pages, and caching.
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
    fn without_a_token_a_request_must_name_a_loopback_address() {
        let guard = Guard::new(None);
        let refused = |host: &str| guard.refusal(&Method::GET, &headers(&[(header::HOST, host)])).is_some();
        for host in ["localhost", "localhost:8090", "127.0.0.1:8090", "127.9.9.9", "[::1]:8090"] {
            assert!(!refused(host), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8090", "", "localhost.evil.example:80"] {
            assert!(refused(host), "{host}");
        }
    }

    #[test]
    fn with_a_token_every_request_needs_it() {
        let guard = Guard::new(Some("secret".to_owned()));
        let status =
            |pairs: &[(HeaderName, &str)]| guard.refusal(&Method::GET, &headers(pairs)).map(|(status, _)| status);
        assert_eq!(status(&[(header::AUTHORIZATION, "Bearer secret")]), None);
        for given in ["Bearer secre", "Bearer secrets", "secret", "Basic secret", "Bearer "] {
            assert_eq!(status(&[(header::AUTHORIZATION, given)]), Some(StatusCode::UNAUTHORIZED), "{given}");
        }
        assert_eq!(status(&[(header::HOST, "localhost")]), Some(StatusCode::UNAUTHORIZED));
    }

    #[test]
    fn a_change_needs_the_header_of_the_dashboard() {
        let guard = Guard::new(None);
        let host = (header::HOST, "localhost");
        assert!(guard.refusal(&Method::POST, &headers(std::slice::from_ref(&host))).is_some());
        assert!(guard.refusal(&Method::POST, &headers(&[host, (CHANGE_HEADER, "1")])).is_none());
    }
}
