//! Misbehaviours: deviations of live accounts, gateways and other emulators that the local account imitates on request.
//! A provider has to tolerate or to detect them.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::active_misbehaviours::ActiveMisbehaviours;

/// A deviation from the normal behaviour of an account. [`Wire::misbehave`](crate::Wire::misbehave) turns it on.
///
/// Each has a name. The control endpoint and the command line accept it as `NAME` or `NAME=VALUE`. A time is written as
/// `250ms` or `4s`.
///
/// ```
/// use duroxide_cosmos_emulator::Misbehaviour;
///
/// let slow: Misbehaviour = "slow-pages=4s".parse()?;
/// assert_eq!(slow, Misbehaviour::SlowPages(std::time::Duration::from_secs(4)));
/// assert_eq!(slow.to_string(), "slow-pages=4000ms");
/// # Ok::<(), duroxide_cosmos_emulator::UnknownMisbehaviour>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// `batches-not-atomic`: batches lose their atomic flag, as Gateway 2.0 may cause. The operations run one by one
    /// until one fails, and nothing is rolled back.
    BatchesNotAtomic,
    /// `batches-ignore-if-match`: batches ignore the ETag conditions of their operations, as users report of the vNext
    /// emulator in Docker.
    BatchesIgnoreIfMatch,
    /// `batches-without-etags`: the answer to a batch has no ETag for any operation.
    BatchesWithoutEtags,
    /// `empty-pages`: an empty page with a continuation precedes every page of a query.
    EmptyPages,
    /// `small-pages=ROWS`: a page of a query has at most this many rows, whatever limit the client requests.
    SmallPages(NonZeroU32),
    /// `slow-pages=TIME`: every page of a query takes this long.
    SlowPages(Duration),
    /// `new-containers-missing=SUBSTATUS,TIME` or `…=SUBSTATUS,REQUESTS`: requests to a new container are answered 404
    /// with this substatus, 1013 or 1003. They are so for this time or for this many requests. The misbehaviour affects
    /// containers that are created while it is on.
    NewContainersMissing {
        /// 1013: the creation is in progress. 1003: the owner does not exist.
        substatus: u32,
        /// When the container becomes available.
        until: Until,
    },
    /// `forbidden` or `forbidden=SUBSTATUS`: requests about items are answered 403. Without a substatus the message is
    /// that of the firewall.
    Forbidden(Option<u32>),
    /// `unauthorized` or `unauthorized=SUBSTATUS`: requests about items are answered 401.
    Unauthorized(Option<u32>),
    /// `refuse-query=TEXT`: queries that contain this text are answered 400, as by an account with another grammar.
    RefuseQuery(String),
    /// `charges-times=FACTOR`: every charge is multiplied by this factor, as on an account with other prices.
    ChargesTimes(f64),
    /// `full-answers`: writes return the whole document although the client requests a minimal answer.
    FullAnswers,
    /// `refuse-priority`: requests that have a priority are answered 400.
    RefusePriority,
    /// `no-time-to-live`: items do not expire.
    NoTimeToLive,
    /// `scan-unindexed`: the account scans for filters on paths that are not indexed, instead of answering 400.
    ScanUnindexed,
    /// `refuse-latest-committed`: reads at `LatestCommitted` are answered 400.
    RefuseLatestCommitted,
}

/// When a new container becomes available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Until {
    /// After this time.
    Time(Duration),
    /// After this many requests to it.
    Requests(u64),
}

/// An error: the text is not the name of a [`Misbehaviour`], or its value is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownMisbehaviour(String);

impl fmt::Display for UnknownMisbehaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Misbehaviour::FORMS.join(", ");
        write!(f, "unknown misbehaviour \"{}\"; use one of: {names}", self.0)
    }
}

impl std::error::Error for UnknownMisbehaviour {}

impl Misbehaviour {
    /// The names of all misbehaviours, with placeholders for their values.
    pub const FORMS: [&'static str; 16] = [
        "batches-not-atomic",
        "batches-ignore-if-match",
        "batches-without-etags",
        "empty-pages",
        "small-pages=ROWS",
        "slow-pages=TIME",
        "new-containers-missing=SUBSTATUS,TIME|REQUESTS",
        "forbidden[=SUBSTATUS]",
        "unauthorized[=SUBSTATUS]",
        "refuse-query=TEXT",
        "charges-times=FACTOR",
        "full-answers",
        "refuse-priority",
        "no-time-to-live",
        "scan-unindexed",
        "refuse-latest-committed",
    ];

    fn parse(name: &str, value: Option<&str>) -> Option<Self> {
        match (name, value) {
            ("batches-not-atomic", None) => Some(Self::BatchesNotAtomic),
            ("batches-ignore-if-match", None) => Some(Self::BatchesIgnoreIfMatch),
            ("batches-without-etags", None) => Some(Self::BatchesWithoutEtags),
            ("empty-pages", None) => Some(Self::EmptyPages),
            ("small-pages", Some(rows)) => rows.parse().ok().map(Self::SmallPages),
            ("slow-pages", Some(time)) => parse_time(time).map(Self::SlowPages),
            ("new-containers-missing", Some(value)) => parse_new_containers(value),
            ("forbidden", None) => Some(Self::Forbidden(None)),
            ("forbidden", Some(substatus)) => substatus.parse().ok().map(|code| Self::Forbidden(Some(code))),
            ("unauthorized", None) => Some(Self::Unauthorized(None)),
            ("unauthorized", Some(substatus)) => substatus.parse().ok().map(|code| Self::Unauthorized(Some(code))),
            ("refuse-query", Some(text)) => Some(Self::RefuseQuery(text.to_owned())),
            ("charges-times", Some(factor)) => parse_factor(factor).map(Self::ChargesTimes),
            ("full-answers", None) => Some(Self::FullAnswers),
            ("refuse-priority", None) => Some(Self::RefusePriority),
            ("no-time-to-live", None) => Some(Self::NoTimeToLive),
            ("scan-unindexed", None) => Some(Self::ScanUnindexed),
            ("refuse-latest-committed", None) => Some(Self::RefuseLatestCommitted),
            _ => None,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::BatchesNotAtomic => "batches-not-atomic",
            Self::BatchesIgnoreIfMatch => "batches-ignore-if-match",
            Self::BatchesWithoutEtags => "batches-without-etags",
            Self::EmptyPages => "empty-pages",
            Self::SmallPages(_) => "small-pages",
            Self::SlowPages(_) => "slow-pages",
            Self::NewContainersMissing { .. } => "new-containers-missing",
            Self::Forbidden(_) => "forbidden",
            Self::Unauthorized(_) => "unauthorized",
            Self::RefuseQuery(_) => "refuse-query",
            Self::ChargesTimes(_) => "charges-times",
            Self::FullAnswers => "full-answers",
            Self::RefusePriority => "refuse-priority",
            Self::NoTimeToLive => "no-time-to-live",
            Self::ScanUnindexed => "scan-unindexed",
            Self::RefuseLatestCommitted => "refuse-latest-committed",
        }
    }

    fn value(&self) -> Option<String> {
        match self {
            Self::SmallPages(rows) => Some(rows.to_string()),
            Self::SlowPages(time) => Some(format_time(*time)),
            Self::NewContainersMissing { substatus, until } => Some(format!("{substatus},{until}")),
            Self::Forbidden(substatus) | Self::Unauthorized(substatus) => substatus.map(|code| code.to_string()),
            Self::RefuseQuery(text) => Some(text.clone()),
            Self::ChargesTimes(factor) => Some(factor.to_string()),
            _ => None,
        }
    }
}

impl FromStr for Misbehaviour {
    type Err = UnknownMisbehaviour;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.split_once('=') {
            Some((name, value)) => Self::parse(name, Some(value)),
            None => Self::parse(text, None),
        };
        parsed.ok_or_else(|| UnknownMisbehaviour(text.to_owned()))
    }
}

impl fmt::Display for Misbehaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value() {
            Some(value) => write!(f, "{}={value}", self.name()),
            None => f.write_str(self.name()),
        }
    }
}

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(time) => f.write_str(&format_time(*time)),
            Self::Requests(count) => write!(f, "{count}"),
        }
    }
}

fn parse_new_containers(value: &str) -> Option<Misbehaviour> {
    let (substatus, until) = value.split_once(',')?;
    let until = match until.parse() {
        Ok(count) => Until::Requests(count),
        Err(_) => Until::Time(parse_time(until)?),
    };
    Some(Misbehaviour::NewContainersMissing { substatus: substatus.parse().ok()?, until })
}

fn parse_factor(text: &str) -> Option<f64> {
    text.parse().ok().filter(|factor: &f64| factor.is_finite() && *factor >= 0.0)
}

fn parse_time(text: &str) -> Option<Duration> {
    match text.strip_suffix("ms") {
        Some(millis) => millis.parse().ok().map(Duration::from_millis),
        None => text.strip_suffix('s')?.parse().ok().map(Duration::from_secs),
    }
}

fn format_time(time: Duration) -> String {
    format!("{}ms", time.as_millis())
}

/// A handle of a misbehaviour that is on. The misbehaviour stays on when the handle is dropped.
#[derive(Clone, Debug)]
pub struct MisbehaviourHandle {
    misbehaviour: Arc<Misbehaviour>,
    all: Arc<MisbehaviourList>,
}

impl MisbehaviourHandle {
    /// Turns the misbehaviour off.
    pub fn remove(&self) {
        self.all.with(|active| active.retain(|other| !Arc::ptr_eq(other, &self.misbehaviour)));
    }
}

/// The misbehaviours that are on, in the order in which they were turned on.
#[derive(Debug, Default)]
pub(crate) struct MisbehaviourList {
    active: Mutex<Vec<Arc<Misbehaviour>>>,
}

impl MisbehaviourList {
    pub fn add(self: &Arc<Self>, misbehaviour: Misbehaviour) -> MisbehaviourHandle {
        let misbehaviour = Arc::new(misbehaviour);
        self.with(|active| active.push(Arc::clone(&misbehaviour)));
        MisbehaviourHandle { misbehaviour, all: Arc::clone(self) }
    }

    pub fn clear(&self) {
        self.with(Vec::clear);
    }

    /// Returns the misbehaviours that are on at this moment.
    pub fn active(&self) -> ActiveMisbehaviours {
        ActiveMisbehaviours::new(self.with(|active| active.clone()))
    }

    fn with<R>(&self, change: impl FnOnce(&mut Vec<Arc<Misbehaviour>>) -> R) -> R {
        change(&mut self.active.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_written_the_same() {
        let with_values = [
            "batches-not-atomic",
            "batches-ignore-if-match",
            "batches-without-etags",
            "empty-pages",
            "small-pages=7",
            "slow-pages=4000ms",
            "new-containers-missing=1013,250ms",
            "forbidden=5301",
            "unauthorized",
            "refuse-query=c.by = 1",
            "charges-times=2.5",
            "full-answers",
            "refuse-priority",
            "no-time-to-live",
            "scan-unindexed",
            "refuse-latest-committed",
        ];
        for (text, form) in with_values.iter().zip(Misbehaviour::FORMS) {
            let parsed: Misbehaviour = text.parse().unwrap();
            assert_eq!(parsed.to_string(), *text);
            assert!(form.starts_with(parsed.name()), "{form}");
        }
        let requests = Misbehaviour::NewContainersMissing { substatus: 1003, until: Until::Requests(3) };
        assert_eq!("new-containers-missing=1003,3".parse(), Ok(requests));
        assert_eq!("forbidden".parse(), Ok(Misbehaviour::Forbidden(None)));
    }

    #[test]
    fn an_unknown_name_or_value_is_refused_with_the_list() {
        for text in ["slow", "small-pages", "small-pages=0", "slow-pages=4", "charges-times=-1", "empty-pages=1"] {
            let error = text.parse::<Misbehaviour>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("small-pages=ROWS"), "{error}");
        }
    }
}
