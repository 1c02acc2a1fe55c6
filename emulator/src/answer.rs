//! What comes back over the wire: an answer, or the reason why there is none.

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

/// What a batch's other operations are answered with when one of them failed.
pub(crate) const FAILED_DEPENDENCY: u16 = 424;

/// An answer with its whole body.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub status: u16,
    pub headers: Headers,
    pub body: Bytes,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The request never left.
    Request,
    /// The request was carried out, or may have been, and its answer is gone.
    Answer,
    /// The emulator could not route the request, as when its region is offline.
    Unroutable(Box<CosmosError>),
}

impl Answer {
    /// Reads the emulator's response to its end.
    pub async fn read(response: AsyncRawResponse) -> Result<Self, Lost> {
        let raw = response.try_into_raw_response().await.map_err(|_| Lost::Answer)?;
        Ok(Self {
            status: u16::from(raw.status()),
            headers: raw.headers().clone(),
            body: Bytes::copy_from_slice(raw.body().as_ref()),
        })
    }

    /// An answer with a JSON body and the headers that the service never omits.
    pub fn json(status: u16, body: &Value) -> Self {
        let mut headers = Headers::new();
        headers.insert(CONTENT_TYPE, "application/json");
        headers.insert(CHARGE, "0");
        headers.insert(ACTIVITY_ID, "00000000-0000-0000-0000-000000000000");
        Self { status, headers, body: Bytes::from(body.to_string()) }
    }

    /// A refusal in the service's shape.
    pub fn refusal(status: u16, substatus: Option<u32>, message: &str) -> Self {
        let mut answer = Self::json(status, &json!({ "code": code_of(status), "message": message }));
        if let Some(substatus) = substatus {
            answer.headers.insert(SUBSTATUS, substatus.to_string());
        }
        answer
    }

    /// Says how long the client should wait before it tries again.
    pub fn with_retry_after(mut self, pause: Option<Duration>) -> Self {
        if let Some(pause) = pause {
            let millis = pause.as_millis().to_string();
            self.headers.insert(RETRY_AFTER, millis);
        }
        self
    }

    /// A batch that was rolled back because of one operation.
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

    /// Says what the request cost.
    pub fn set_charge(&mut self, charge: f64) {
        self.headers.insert(CHARGE, format!("{charge:.2}"));
    }

    /// What the request cost, as the answer says.
    pub fn charge(&self) -> f64 {
        let charge = self.headers.get_optional_str(&CHARGE);
        charge.and_then(|text| text.parse().ok()).unwrap_or(0.0)
    }

    /// Whether the request was carried out.
    pub fn is_success(&self) -> bool {
        self.status < 400
    }
}

/// The word that the service puts beside a status.
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
