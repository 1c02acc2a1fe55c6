//! The errors of the service, in the terms of the provider.
//!
//! [`classify`] maps each error of the SDK to an [`ErrorClass`]. By the class, the store makes another attempt,
//! returns an outcome of the write, or returns a [`StoreError`].

use super::bootstrap::THROUGHPUT_ADVICE;
use azure_data_cosmos::CosmosError;
use duroxide::providers::ProviderError;
use std::time::Duration;

/// A failure of the store: one that lasted until the deadline, or one that no retry can solve. It never holds a secret.
///
/// ```
/// use duroxide_cosmos::StoreError;
///
/// let error = StoreError::Unavailable { detail: "429/3200: too many requests".into() };
/// assert!(error.is_retryable() && !error.is_unstorable());
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The service was throttling or unreachable until the caller's deadline. Nothing was changed.
    #[error("the service did not serve the request in time: {detail}")]
    Unavailable {
        /// The failure of the last attempt.
        detail: String,
    },
    /// The caller's deadline passed while a write was in flight. The write may have been applied.
    #[error("it is not known whether the write happened: {detail}")]
    OutcomeUnknown {
        /// The failure of the last attempt.
        detail: String,
    },
    /// The service refused the request (400), and would refuse it again.
    #[error("the service refused {document}: {detail}")]
    Rejected {
        /// The document or query that was refused.
        document: String,
        /// The service's reason.
        detail: String,
    },
    /// A document or batch is larger than the service allows. The service said so (413), or the store before sending.
    #[error("{document} has {bytes} bytes, but the limit is {limit}")]
    TooLarge {
        /// The document or batch.
        document: String,
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The service refused the credential (401, 403).
    #[error("access denied with {credential}: {detail}. {advice}")]
    Denied {
        /// The kind of credential in use, never the credential itself.
        credential: String,
        /// The service's reason.
        detail: String,
        /// The setting to change or the role to assign.
        advice: String,
    },
    /// The logical partition has reached its limit of 20 GB (403/1014).
    #[error("the partition {partition} is full (20 GB): prune or delete old executions of that instance")]
    PartitionFull {
        /// The partition that is full.
        partition: String,
    },
    /// The database or the container does not exist.
    #[error("{what} does not exist: create it with `{command}` ({})", THROUGHPUT_ADVICE)]
    Missing {
        /// The missing container and its database.
        what: String,
        /// The command that creates it.
        command: String,
    },
    /// The container exists, but the provider can't use it as it is.
    #[error("the container {container} does not fit: {problem}. {remedy}")]
    Unfit {
        /// The container's name.
        container: String,
        /// The property that does not fit.
        problem: String,
        /// The command that repairs it.
        remedy: String,
    },
    /// The container's physical partitions were split or merged since the query began. The same query on the current
    /// partitions succeeds.
    #[error("{detail}")]
    PartitionsChanged {
        /// The query that failed.
        detail: String,
    },
    /// A document or answer can't be serialised or parsed as JSON, or an answer contradicts the protocol.
    #[error("{detail}")]
    Malformed {
        /// The document or answer, and the reason.
        detail: String,
    },
}

impl From<serde_json::Error> for StoreError {
    /// The error for a document that can't be serialised as JSON.
    fn from(error: serde_json::Error) -> Self {
        Self::Malformed { detail: format!("a document can't be serialised as JSON: {error}") }
    }
}

impl StoreError {
    /// The error for a work item that can't be serialised as JSON.
    pub(crate) fn unwritable(error: serde_json::Error) -> Self {
        Self::Malformed { detail: format!("a work item can't be serialised as JSON: {error}") }
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::OutcomeUnknown { .. } | Self::PartitionsChanged { .. })
    }

    /// Whether the turn or item itself can't be stored, by any worker.
    pub fn is_unstorable(&self) -> bool {
        matches!(self, Self::Rejected { .. } | Self::TooLarge { .. })
    }

    /// Whether the failure concerns one document or partition only, and says nothing about the others.
    pub(crate) fn is_of_one_partition(&self) -> bool {
        self.is_unstorable() || matches!(self, Self::Malformed { .. } | Self::PartitionFull { .. })
    }

    /// The pause before the next attempt on the same work. A document that can't be read or written now can't be in a
    /// moment either, so other work goes first.
    pub(crate) fn pause(&self) -> Duration {
        match self {
            error if error.is_of_one_partition() => Duration::from_secs(5),
            _ => Duration::from_millis(200),
        }
    }

    /// The error as duroxide's runtime expects it.
    pub(crate) fn into_provider_error(self, operation: &str) -> ProviderError {
        if self.is_retryable() {
            ProviderError::retryable(operation, self.to_string())
        } else {
            ProviderError::permanent(operation, self.to_string())
        }
    }
}

/// The meaning of a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ErrorClass {
    /// Make another attempt. `applied` tells whether this attempt may have changed something.
    Retry { after: Option<Duration>, applied: Applied },
    /// 404 on the document itself.
    Absent,
    /// 409: a document with this id exists.
    Exists,
    /// 412: the document has another ETag.
    Stale,
    /// 400: the request is refused.
    Rejected,
    /// 413: the request is too large.
    TooLarge,
    /// 401, 403: access is denied.
    Denied,
    /// 403/1014: the logical partition is full.
    Full,
    /// 404 on the container or database.
    ContainerMissing,
    /// The SDK could not process the request or the answer. The same call would fail again.
    Broken,
}

/// Whether an attempt that failed may have been applied nevertheless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    /// The service did not apply it.
    No,
    /// Its answer was lost, so it may have been applied.
    Perhaps,
}

impl Applied {
    /// Whether one of two attempts may have been applied.
    pub(crate) fn or(self, other: Self) -> Self {
        match self {
            Self::No => other,
            Self::Perhaps => self,
        }
    }
}

/// Substatus of a logical partition that has reached its size limit.
pub(super) const PARTITION_FULL: u16 = 1_014;
/// Substatus of a 404 that means the container or database, not the document.
const OWNER_NOT_FOUND: u16 = 1_003;
/// Substatus when the SDK reads the account and the credential returns no token.
const NO_TOKEN: u16 = 20_402;
/// Substatus of any other request that the SDK could not sign. Its text has the reason.
const NOT_SIGNED: u16 = 20_401;

/// Substatus of a 404 while a container that was just created is being set up.
const CREATION_IN_PROGRESS: u16 = 1_013;
/// Substatuses of a transient 401:
///
/// - the token is not valid yet, or has expired, because clocks differ;
/// - the service could not look up the groups of the identity.
const TOKEN_NOT_YET_VALID: u16 = 5_005;
const TOKEN_EXPIRED: u16 = 5_006;
const GROUPS_NOT_FOUND: u16 = 5_201;

/// Substatus of a 404 of a region that lags behind the session token, and of the SDK's error when all regions do.
const SESSION_BEHIND: u16 = 1_002;
const SESSION_UNAVAILABLE: u16 = 20_310;

/// Substatus of the SDK's own 500 for a query whose partitions were split, when it could not list the new ones.
const SPLIT_NOT_FOLLOWED: u16 = 20_206;

/// The status and the substatus. A missing substatus is zero.
pub(super) fn codes(error: &CosmosError) -> (u16, u16) {
    let status = error.status();
    (u16::from(status.status_code()), status.sub_status().map_or(0, |s| s.value()))
}

/// Classifies one failed attempt.
pub(super) fn classify(error: &CosmosError) -> ErrorClass {
    let (refused, failed) = applied(error);
    match codes(error) {
        (401, NO_TOKEN | NOT_SIGNED | TOKEN_NOT_YET_VALID | TOKEN_EXPIRED | GROUPS_NOT_FOUND) => {
            ErrorClass::Retry { after: None, applied: refused }
        }
        (403, PARTITION_FULL) => ErrorClass::Full,
        (401 | 403, _) => ErrorClass::Denied,
        (404, CREATION_IN_PROGRESS) => ErrorClass::Retry { after: retry_after(error), applied: refused },
        (404, OWNER_NOT_FOUND) => ErrorClass::ContainerMissing,
        (404, _) => ErrorClass::Absent,
        (409, _) => ErrorClass::Exists,
        (412, _) => ErrorClass::Stale,
        (400, _) => ErrorClass::Rejected,
        (413, _) => ErrorClass::TooLarge,
        (429 | 449, _) => ErrorClass::Retry { after: retry_after(error), applied: refused },
        (500, SPLIT_NOT_FOLLOWED) => ErrorClass::Retry { after: None, applied: failed },
        // Any other 500 of the SDK itself is a fault in the request or in its reading of the answer.
        (500, _) if !error.is_from_wire() => ErrorClass::Broken,
        // Transient failures, and every status that is not known here. A proxy or a later service may send any status,
        // and none of those proves that the request is wrong.
        _ => ErrorClass::Retry { after: retry_after(error), applied: failed },
    }
}

/// Whether no region can serve the session token. The SDK reports that after it has asked all of them.
pub(super) fn is_session_unavailable(error: &CosmosError) -> bool {
    matches!(codes(error), (503, SESSION_UNAVAILABLE) | (404, SESSION_BEHIND))
}

/// Whether the service did not accept the key or the token.
pub(super) fn is_unauthorized(error: &CosmosError) -> bool {
    codes(error).0 == 401
}

/// Whether the service considers the token expired. The clock of this machine may differ.
pub(super) fn is_token_expired(error: &CosmosError) -> bool {
    codes(error) == (401, TOKEN_EXPIRED)
}

/// Whether the credential returned no token.
pub(super) fn is_token_missing(error: &CosmosError) -> bool {
    is_unauthorized(error) && !error.is_from_wire()
}

/// Whether a write may have been applied: first if its last answer is a refusal, second if it is a failure.
///
/// The SDK repeats writes by itself. After a repetition the last answer says nothing about the requests before it.
fn applied(error: &CosmosError) -> (Applied, Applied) {
    let Some(diagnostics) = error.diagnostics() else { return (Applied::No, Applied::Perhaps) };
    let never_left =
        diagnostics.requests().iter().filter(|request| !request.request_sent().may_have_been_sent()).count();
    match diagnostics.request_count() - never_left {
        0 => (Applied::No, Applied::No),
        1 => (Applied::No, Applied::Perhaps),
        _ => (Applied::Perhaps, Applied::Perhaps),
    }
}

/// Whether the SDK has sent the request more than once. Then an earlier request may be the reason for a refusal.
pub(super) fn is_repeated(error: &CosmosError) -> bool {
    applied(error).0 == Applied::Perhaps
}

fn retry_after(error: &CosmosError) -> Option<Duration> {
    error.response().and_then(|r| r.headers().retry_after_ms).map(Duration::from_millis)
}

/// The status and the first words of an error: enough to look it up, too little to leak a secret.
pub(super) fn describe(error: &CosmosError) -> String {
    let (code, substatus) = codes(error);
    let words = first_line(error);
    // Some texts of the SDK begin with the status.
    let mut text = words.strip_prefix(&format!("{code}/{substatus}: ")).unwrap_or(&words).to_owned();
    if substatus == NO_TOKEN {
        // The SDK's text leaves out the reason. A chain of credentials has one reason for each of them.
        let mut cause = std::error::Error::source(error);
        while let Some(reason) = cause {
            let words = on_one_line(reason);
            // An error that only wraps another repeats its text.
            if !text.ends_with(&words) {
                text = format!("{text}: {words}");
            }
            cause = reason.source();
        }
    }
    if matches!((code, substatus), (401, TOKEN_NOT_YET_VALID | TOKEN_EXPIRED)) {
        text.push_str(" (check this machine's clock)");
    }
    match error.status().name() {
        Some(name) => format!("{code}/{substatus} {name}: {text}"),
        None => format!("{code}/{substatus}: {text}"),
    }
}

fn first_line(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().chars().take(240).collect()
}

fn on_one_line(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ").chars().take(480).collect()
}

/// The error for an answer that has no ETag.
pub(super) fn no_etag(document: &str) -> StoreError {
    StoreError::Malformed { detail: format!("the service's answer for {document} has no ETag") }
}
