//! What can go wrong with the service, in our terms.
//!
//! [`classify`] is DESIGN.md's error table: what the SDK says becomes a [`ErrorClass`], and the store either rides it out,
//! hands it to the caller as an outcome of the write, or returns it as a [`StoreError`].

use super::bootstrap::THROUGHPUT_ADVICE;
use azure_data_cosmos::CosmosError;
use duroxide::providers::ProviderError;
use std::time::Duration;

/// A failure that the store could not ride out or that no waiting mends. Never holds a secret.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The service was throttling or out of reach until the caller's time was up. Nothing was changed.
    #[error("the service did not serve the request in time: {detail}")]
    Unavailable {
        /// What the last attempt met.
        detail: String,
    },
    /// The caller's time was up with a write on its way: it may have happened.
    #[error("it is not known whether the write happened: {detail}")]
    OutcomeUnknown {
        /// What the last attempt met.
        detail: String,
    },
    /// The service refused what was sent (400), and would again.
    #[error("the service refused {document}: {detail}")]
    Rejected {
        /// The document or query that was refused.
        document: String,
        /// The service's reason.
        detail: String,
    },
    /// A document or batch over the service's limit (413, or seen before it was sent).
    #[error("{document} has {bytes} bytes, but the limit is {limit}")]
    TooLarge {
        /// What is too large.
        document: String,
        /// Its size.
        bytes: usize,
        /// The limit that it passes.
        limit: usize,
    },
    /// The credential was refused (401, 403).
    #[error("access denied with {credential}: {detail}. {advice}")]
    Denied {
        /// The kind of credential in use, never the credential itself.
        credential: String,
        /// The service's reason.
        detail: String,
        /// What to set or assign.
        advice: String,
    },
    /// The logical partition has reached its 20 GB (403/1014).
    #[error("the partition {partition} is full (20 GB): prune or delete old executions of that instance")]
    PartitionFull {
        /// The partition that is full.
        partition: String,
    },
    /// The database or the container is not there.
    #[error("{what} does not exist: create it with `{command}` ({})", THROUGHPUT_ADVICE)]
    Missing {
        /// What is missing.
        what: String,
        /// The command that creates it.
        command: String,
    },
    /// The container is there but does not fit what the provider needs.
    #[error("the container {container} does not fit: {problem}. {remedy}")]
    Unfit {
        /// The container's name.
        container: String,
        /// What is wrong with it.
        problem: String,
        /// The command that mends it.
        remedy: String,
    },
    /// The container's physical partitions are others than those that were asked. The same question to the present ones
    /// succeeds.
    #[error("{detail}")]
    PartitionsChanged {
        /// What was asked.
        detail: String,
    },
    /// A document or answer that could not be written or read as JSON, or an answer that makes no sense.
    #[error("{detail}")]
    Malformed {
        /// What could not be understood.
        detail: String,
    },
}

impl From<serde_json::Error> for StoreError {
    /// A document that can't be written as JSON.
    fn from(error: serde_json::Error) -> Self {
        Self::Malformed { detail: format!("a document can't be written as JSON: {error}") }
    }
}

impl StoreError {
    pub(crate) fn unwritable(error: serde_json::Error) -> Self {
        Self::Malformed { detail: format!("a work item can't be written as JSON: {error}") }
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::OutcomeUnknown { .. } | Self::PartitionsChanged { .. })
    }

    /// Whether the turn or item itself can't be stored, whoever tries.
    pub fn is_unstorable(&self) -> bool {
        matches!(self, Self::Rejected { .. } | Self::TooLarge { .. })
    }

    /// Whether it is about a document or a partition, and says nothing about the others.
    pub(crate) fn is_of_one_partition(&self) -> bool {
        self.is_unstorable() || matches!(self, Self::Malformed { .. } | Self::PartitionFull { .. })
    }

    /// When to try again what has met this. A document that can't be read or written now can't be in a moment either: others
    /// come first.
    pub(crate) fn pause(&self) -> Duration {
        match self {
            error if error.is_of_one_partition() => Duration::from_secs(5),
            _ => Duration::from_millis(200),
        }
    }

    /// The error as duroxide's runtime reads it.
    pub(crate) fn into_provider_error(self, operation: &str) -> ProviderError {
        if self.is_retryable() {
            ProviderError::retryable(operation, self.to_string())
        } else {
            ProviderError::permanent(operation, self.to_string())
        }
    }
}

/// What the answer to one attempt means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    /// Try again. `applied` tells whether the attempt may have changed something.
    Retry { after: Option<Duration>, applied: Applied },
    /// 404 on the document itself.
    Absent,
    /// 409: a document with this id is there.
    Exists,
    /// 412: the document is not as the condition says.
    Stale,
    /// 400.
    Rejected,
    /// 413.
    TooLarge,
    /// 401, 403.
    Denied,
    /// 403/1014.
    Full,
    /// 404 on the container or database.
    ContainerMissing,
    /// The SDK could not make sense of what we sent or of the answer: the same call fails again.
    Broken,
}

/// Whether an attempt that failed may have happened all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    /// The service said that it did nothing.
    No,
    /// Nobody knows.
    Perhaps,
}

impl Applied {
    /// Whether one of two attempts may have happened.
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
/// Substatus of a token that the credential could not get, when the SDK reads the account.
const TOKEN_NOT_HAD: u16 = 20_402;
/// Substatus of a request that could not be signed: in all other requests the same, with the reason in the text.
const NOT_SIGNED: u16 = 20_401;

/// Substatus of a 404 while a container that was just created is being set up.
const CREATION_IN_PROGRESS: u16 = 1_013;
/// Substatuses of a 401 that passes: the token is not valid yet, or not any more (clocks differ), or the service could not
/// look up the identity's groups.
const TOKEN_NOT_YET_VALID: u16 = 5_005;
const TOKEN_EXPIRED: u16 = 5_006;
const GROUPS_NOT_FOUND: u16 = 5_201;

/// Substatus of a 404 of a region that is behind the session's token, and of what the SDK makes of it once all have said so.
const SESSION_BEHIND: u16 = 1_002;
const SESSION_UNAVAILABLE: u16 = 20_310;

/// Substatus of a query whose partitions were split and whose new ones the SDK could not list, which it makes up as a 500.
const SPLIT_NOT_FOLLOWED: u16 = 20_206;

/// The status and the substatus, zero where there is none.
pub(super) fn codes(error: &CosmosError) -> (u16, u16) {
    let status = error.status();
    (u16::from(status.status_code()), status.sub_status().map_or(0, |s| s.value()))
}

/// Reads one failed attempt.
pub(crate) fn classify(error: &CosmosError) -> ErrorClass {
    let (refused, failed) = applied(error);
    match codes(error) {
        (401, TOKEN_NOT_HAD | NOT_SIGNED | TOKEN_NOT_YET_VALID | TOKEN_EXPIRED | GROUPS_NOT_FOUND) => {
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
        // Any other 500 that the SDK made up itself is a fault in what we sent or in how it read the answer.
        (500, _) if !error.is_from_wire() => ErrorClass::Broken,
        // Failures that pass, and every status that we do not know: a proxy or a later service may answer anything, and
        // none of it says that the request is wrong.
        _ => ErrorClass::Retry { after: retry_after(error), applied: failed },
    }
}

/// Whether no region had what the session token asks for, as the SDK says once it has asked them.
pub(crate) fn is_session_unavailable(error: &CosmosError) -> bool {
    matches!(codes(error), (503, SESSION_UNAVAILABLE) | (404, SESSION_BEHIND))
}

/// Whether the service did not accept the key or the token.
pub(crate) fn is_unauthorized(error: &CosmosError) -> bool {
    codes(error).0 == 401
}

/// Whether the service takes the token for an expired one, whatever this machine's clock says.
pub(crate) fn is_token_expired(error: &CosmosError) -> bool {
    codes(error) == (401, TOKEN_EXPIRED)
}

/// Whether the credential gave no token.
pub(crate) fn is_token_missing(error: &CosmosError) -> bool {
    is_unauthorized(error) && !error.is_from_wire()
}

/// Whether a write may have been done where its last answer was a refusal, and where it was a failure.
///
/// The SDK sends a write again by itself: then the last answer says nothing about the attempts before.
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

/// Whether the SDK has sent the request more than once: then a refusal may be one of what an earlier one has done.
pub(crate) fn is_repeated(error: &CosmosError) -> bool {
    applied(error).0 == Applied::Perhaps
}

fn retry_after(error: &CosmosError) -> Option<Duration> {
    error.response().and_then(|r| r.headers().retry_after_ms).map(Duration::from_millis)
}

/// The status and the first words of an error: enough to look it up, too little to leak.
pub(crate) fn describe(error: &CosmosError) -> String {
    let (code, substatus) = codes(error);
    let words = first_line(error);
    // The SDK's own words begin with the status in some errors.
    let mut text = words.strip_prefix(&format!("{code}/{substatus}: ")).unwrap_or(&words).to_owned();
    if substatus == TOKEN_NOT_HAD {
        // Why there is no token, which the SDK's own words leave out: of a chain of credentials, each one's reason.
        let mut cause = std::error::Error::source(error);
        while let Some(reason) = cause {
            let words = on_one_line(reason);
            // An error that only wraps another repeats its words.
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
