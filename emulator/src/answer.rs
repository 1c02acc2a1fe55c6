//! An answer on the wire, or the reason why a request has none.

use std::time::Duration;

use azure_core::http::{
    headers::{HeaderName, Headers},
    AsyncRawResponse,
};
use azure_core::Bytes;
use azure_data_cosmos_driver::CosmosError;
use serde_json::{json, Value};

const CHARGE: HeaderName = HeaderName::from_static("x-ms-request-charge");
pub(crate) const SUBSTATUS: HeaderName = HeaderName::from_static("x-ms-substatus");
const RETRY_AFTER: HeaderName = HeaderName::from_static("x-ms-retry-after-ms");
const CONTENT_TYPE: HeaderName = HeaderName::from_static("content-type");
const ACTIVITY_ID: HeaderName = HeaderName::from_static("x-ms-activity-id");

/// The status of the other operations of a batch in which one operation failed.
pub(crate) const FAILED_DEPENDENCY: u16 = 424;

/// An answer with its complete body.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub status: u16,
    pub headers: Headers,
    pub body: Bytes,
}

/// The reason why a request has no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// The connection failed before the request was sent.
    NotSent,
    /// The request was executed, or may have been, and its answer is lost.
    AnswerLost,
    /// The emulator could not route the request, for example because its region is offline.
    Unroutable(Box<CosmosError>),
}

impl Answer {
    /// Reads the emulator's response completely.
    pub async fn read(response: AsyncRawResponse) -> Result<Self, NoAnswer> {
        let raw = response.try_into_raw_response().await.map_err(|_| NoAnswer::AnswerLost)?;
        Ok(Self {
            status: u16::from(raw.status()),
            headers: raw.headers().clone(),
            body: Bytes::copy_from_slice(raw.body().as_ref()),
        })
    }

    /// Creates an answer with a JSON body and the headers that the service always sends.
    pub fn json(status: u16, body: &Value) -> Self {
        let mut headers = Headers::new();
        headers.insert(CONTENT_TYPE, "application/json");
        headers.insert(CHARGE, "0");
        headers.insert(ACTIVITY_ID, "00000000-0000-0000-0000-000000000000");
        Self { status, headers, body: Bytes::from(body.to_string()) }
    }

    /// Creates a refusal in the service's format.
    pub fn refusal(status: u16, substatus: Option<u32>, message: &str) -> Self {
        let mut answer = Self::json(status, &json!({ "code": code_of(status), "message": message }));
        if let Some(substatus) = substatus {
            answer.headers.insert(SUBSTATUS, substatus.to_string());
        }
        answer
    }

    /// Sets the time that the client should wait before it tries again.
    pub fn with_retry_after(mut self, pause: Option<Duration>) -> Self {
        if let Some(pause) = pause {
            let millis = pause.as_millis().to_string();
            self.headers.insert(RETRY_AFTER, millis);
        }
        self
    }

    /// Creates the answer to a batch that was rolled back because one operation failed.
    pub fn rolled_back(operations: usize, failed: usize, status: u16, substatus: Option<u32>) -> Self {
        let result = |index: usize| {
            if index != failed {
                return json!({ "statusCode": FAILED_DEPENDENCY, "requestCharge": 0 });
            }
            let mut result = json!({ "statusCode": status, "requestCharge": 0 });
            if let Some(substatus) = substatus {
                result["subStatusCode"] = json!(substatus);
            }
            result
        };
        Self::json(207, &(0..operations).map(result).collect())
    }

    /// Sets the charge of the request.
    pub fn set_charge(&mut self, charge: f64) {
        self.headers.insert(CHARGE, format!("{charge:.2}"));
    }

    /// Returns the charge of the request.
    pub fn charge(&self) -> f64 {
        let charge = self.headers.get_optional_str(&CHARGE);
        charge.and_then(|text| text.parse().ok()).unwrap_or(0.0)
    }

    /// Whether the request succeeded.
    pub fn is_success(&self) -> bool {
        self.status < 400
    }
}

/// Returns the service's error code for a status.
fn code_of(status: u16) -> &'static str {
    match status {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        408 => "RequestTimeout",
        409 => "Conflict",
        410 => "Gone",
        412 => "PreconditionFailed",
        413 => "RequestEntityTooLarge",
        429 => "TooManyRequests",
        449 => "RetryWith",
        503 => "ServiceUnavailable",
        _ => "Error",
    }
}
