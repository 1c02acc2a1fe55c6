//! Authorisation of requests over HTTP, by the rules of the service.

use azure_core::credentials::Secret;
use azure_core::hmac::hmac_sha256;
use azure_core::http::{
    headers::{HeaderName, Headers, AUTHORIZATION},
    Method,
};
use percent_encoding::percent_decode_str;

use crate::account::LocalAccount;
use crate::answer::Answer;
use crate::request::{classify, Outgoing, RequestKind};

const MS_DATE: HeaderName = HeaderName::from_static("x-ms-date");
const DATE: HeaderName = HeaderName::from_static("date");

/// The service's substatus for an operation that no data plane role allows.
const NO_DATA_PLANE_PERMISSION: u32 = 5300;

/// The service's substatus for an identity without a role assignment.
const NO_ROLE: u32 = 5301;

/// A credential from the authorization header.
#[derive(Debug, PartialEq)]
pub(crate) enum Credential {
    /// A signature made with the account key.
    Signature(String),
    /// An Entra ID bearer token.
    Token(String),
}

impl Credential {
    /// Reads `type=…&ver=1.0&sig=…`, percent-encoded.
    pub fn read(headers: &Headers) -> Option<Self> {
        let header = headers.get_optional_str(&AUTHORIZATION)?;
        let text = percent_decode_str(header).decode_utf8().ok()?;
        let (kind, rest) = text.strip_prefix("type=")?.split_once('&')?;
        let (version, signature) = rest.split_once("&sig=")?;
        match (kind, version) {
            ("master", "ver=1.0") => Some(Self::Signature(signature.to_owned())),
            ("aad", "ver=1.0") => Some(Self::Token(signature.to_owned())),
            _ => None,
        }
    }
}

/// Returns the refusal of a request that its credential does not allow.
pub(crate) fn refusal(account: &LocalAccount, credential: Option<&Credential>, request: &Outgoing) -> Option<Answer> {
    match credential {
        Some(Credential::Signature(signature)) => {
            let signed = is_signed(account.secret(), signature, request);
            (!signed).then(|| {
                unauthorized("The MAC signature found in the HTTP request is not the same as the computed signature.")
            })
        }
        Some(Credential::Token(token)) if !account.accepts(token) && account.knows(token) => Some(no_role()),
        Some(Credential::Token(token)) if !account.accepts(token) => {
            Some(unauthorized("The bearer token is not accepted by this account."))
        }
        Some(Credential::Token(_)) => is_control_plane(request).then(forbidden),
        None => Some(unauthorized("Required Header authorization is missing or malformed.")),
    }
}

fn unauthorized(reason: &str) -> Answer {
    let message = format!("The input authorization token can't serve the request. {reason}");
    Answer::refusal(401, None, &message)
}

fn no_role() -> Answer {
    let message = "Request blocked by Auth: the given principal does not have the required RBAC permissions.";
    Answer::refusal(403, Some(NO_ROLE), message)
}

fn forbidden() -> Answer {
    let message = "The given request cannot be authorized by AAD token in data plane.";
    Answer::refusal(403, Some(NO_DATA_PLANE_PERMISSION), message)
}

/// Whether no data plane role allows the request: it changes databases or containers, or concerns throughput.
fn is_control_plane(request: &Outgoing) -> bool {
    let kind = classify(request.method, &request.segments(), &request.headers);
    match kind {
        RequestKind::Database | RequestKind::Container => request.method != Method::Get,
        RequestKind::Offer => true,
        _ => false,
    }
}

fn is_signed(key: &Secret, signature: &str, request: &Outgoing) -> bool {
    let headers = &request.headers;
    let date = headers.get_optional_str(&MS_DATE).or_else(|| headers.get_optional_str(&DATE));
    let Some(date) = date else { return false };
    let verb = request.method.as_str().to_ascii_lowercase();
    let (kind, links) = resource(&request.segments());
    let is_match = |link: &String| {
        let text = format!("{verb}\n{kind}\n{link}\n{}\n\n", date.to_ascii_lowercase());
        hmac_sha256(&text, key).is_ok_and(|expected| expected == signature)
    };
    links.iter().any(is_match)
}

/// Returns the resource type, and the links that a client may have signed: the path by names, or the lower-case
/// resource id.
fn resource(segments: &[String]) -> (String, Vec<String>) {
    let is_feed = segments.len() % 2 == 1;
    let (kind, named) = match segments {
        [] => return (String::new(), vec![String::new()]),
        [parents @ .., kind] if is_feed => (kind, parents),
        all => (&all[all.len() - 2], all),
    };
    let by_resource_id = named.last().map(|id| id.to_lowercase());
    let links = std::iter::once(named.join("/")).chain(by_resource_id).collect();
    (kind.clone(), links)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(path: &str) -> (String, String) {
        let (kind, links) = resource(&crate::request::segments(path));
        (kind, links[0].clone())
    }

    #[test]
    fn the_signed_link_of_a_feed_is_that_of_its_parent() {
        let of = |kind: &str, link: &str| (kind.to_owned(), link.to_owned());
        assert_eq!(parts("/"), of("", ""));
        assert_eq!(parts("/dbs"), of("dbs", ""));
        assert_eq!(parts("/dbs/d"), of("dbs", "dbs/d"));
        assert_eq!(parts("/dbs/d/colls/c/docs/"), of("docs", "dbs/d/colls/c"));
        assert_eq!(parts("/dbs/d/colls/c/docs/a%20b"), of("docs", "dbs/d/colls/c/docs/a b"));
    }

    #[test]
    fn credentials_are_percent_decoded() {
        let mut headers = Headers::new();
        headers.insert(AUTHORIZATION, "type%3Daad%26ver%3D1.0%26sig%3Dey.a%3D");
        let token = Credential::Token("ey.a=".to_owned());
        assert_eq!(Credential::read(&headers), Some(token));
        headers.insert(AUTHORIZATION, "Bearer ey.a=");
        assert_eq!(Credential::read(&headers), None);
    }
}
