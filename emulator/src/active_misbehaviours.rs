//! The misbehaviours that are on at one moment, and their effect on a request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use azure_core::http::headers::HeaderName;
use azure_core::http::Method;
use serde_json::Value;

use crate::answer::Answer;
use crate::misbehaviour::{Misbehaviour, Until};
use crate::names::ContainerName;
use crate::request::{classify, header, read_json, Outgoing, RequestDetails, RequestKind, READ_STRATEGY};

const MAX_ITEM_COUNT: HeaderName = HeaderName::from_static("x-ms-max-item-count");
const PREFER: HeaderName = HeaderName::from_static("prefer");
const CONTENT_RESPONSE: HeaderName = HeaderName::from_static("x-ms-cosmos-populate-content-response-on-write");
const ENABLE_SCAN: HeaderName = HeaderName::from_static("x-ms-documentdb-query-enable-scan");
const PRIORITY: HeaderName = HeaderName::from_static("x-ms-cosmos-priority-level");

/// The misbehaviours that are on while the account answers one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveMisbehaviours {
    active: Vec<Arc<Misbehaviour>>,
}

impl ActiveMisbehaviours {
    pub fn new(active: Vec<Arc<Misbehaviour>>) -> Self {
        Self { active }
    }

    /// Whether no misbehaviour is on.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether this misbehaviour is on. For misbehaviours without a value.
    pub fn is(&self, misbehaviour: &Misbehaviour) -> bool {
        self.active.iter().any(|active| **active == *misbehaviour)
    }

    /// Whether the account deletes items after their time to live.
    pub fn honours_time_to_live(&self) -> bool {
        !self.is(&Misbehaviour::NoTimeToLive)
    }

    /// Returns the names of the misbehaviours with their values.
    pub fn names(&self) -> Vec<String> {
        self.active.iter().map(ToString::to_string).collect()
    }

    /// Returns the factor by which the account multiplies every charge.
    pub fn charge_factor(&self) -> f64 {
        let factor = |misbehaviour: &Misbehaviour| match misbehaviour {
            Misbehaviour::ChargesTimes(factor) => Some(*factor),
            _ => None,
        };
        self.each(factor).product()
    }

    /// Returns the time that is added to every query page.
    pub fn page_time(&self) -> Duration {
        let time = |misbehaviour: &Misbehaviour| match misbehaviour {
            Misbehaviour::SlowPages(time) => Some(*time),
            _ => None,
        };
        self.each(time).sum()
    }

    /// Rewrites the headers of a request.
    pub fn rewrite(&self, request: &mut Outgoing) {
        for misbehaviour in &self.active {
            match **misbehaviour {
                Misbehaviour::SmallPages(rows) if is_query(request) => limit_page(request, rows.get()),
                Misbehaviour::FullAnswers => {
                    request.headers.remove(PREFER);
                    request.headers.remove(CONTENT_RESPONSE);
                }
                Misbehaviour::ScanUnindexed if is_query(request) => request.headers.insert(ENABLE_SCAN, "true"),
                _ => (),
            }
        }
    }

    /// Returns the refusal of a request that an account without misbehaviours would accept.
    pub fn refusal(
        &self,
        request: &Outgoing,
        details: &RequestDetails,
        new_containers: &NewContainers,
    ) -> Option<Answer> {
        self.active.iter().find_map(|misbehaviour| match &**misbehaviour {
            Misbehaviour::Forbidden(substatus) => refuse_item_request(details, 403, *substatus),
            Misbehaviour::Unauthorized(substatus) => refuse_item_request(details, 401, *substatus),
            Misbehaviour::NewContainersMissing { .. } => new_containers.refusal(request),
            Misbehaviour::RefuseQuery(text) => refuse_query(request, details, text),
            Misbehaviour::RefusePriority => refuse_header(request, &PRIORITY, None),
            Misbehaviour::RefuseLatestCommitted => refuse_header(request, &READ_STRATEGY, Some("LatestCommitted")),
            _ => None,
        })
    }

    /// Remembers a new container, if new containers are missing for a while.
    pub fn record_created(
        &self,
        request: &Outgoing,
        details: &RequestDetails,
        answer: &Answer,
        new_containers: &NewContainers,
    ) {
        let is_created =
            details.kind == RequestKind::Container && request.method == Method::Post && answer.status == 201;
        let missing = self.each(|misbehaviour| match misbehaviour {
            Misbehaviour::NewContainersMissing { substatus, until } => Some((*substatus, *until)),
            _ => None,
        });
        if let (true, Some((substatus, until))) = (is_created, missing.last()) {
            new_containers.add(request, substatus, until);
        }
    }

    fn each<'a, R>(&'a self, pick: impl Fn(&Misbehaviour) -> Option<R> + 'a) -> impl Iterator<Item = R> + 'a {
        self.active.iter().filter_map(move |misbehaviour| pick(misbehaviour))
    }
}

/// New containers. For a while, requests to them are answered 404.
#[derive(Debug, Default)]
pub(crate) struct NewContainers {
    containers: Mutex<HashMap<ContainerName, NewContainer>>,
}

#[derive(Debug)]
struct NewContainer {
    substatus: u32,
    created: Instant,
    until: Until,
}

impl NewContainers {
    fn add(&self, request: &Outgoing, substatus: u32, until: Until) {
        let id = read_json(&request.body).and_then(|body| body["id"].as_str().map(str::to_owned));
        let (Some(container), Some(database)) = (id, request.segments().into_iter().nth(1)) else { return };
        let name = ContainerName { database, container };
        let container = NewContainer { substatus, created: Instant::now(), until };
        self.with(|containers| containers.insert(name, container));
    }

    fn refusal(&self, request: &Outgoing) -> Option<Answer> {
        let name = ContainerName::of(request)?;
        let substatus = self.with(|containers| {
            let container = containers.get_mut(&name)?;
            let substatus = container.substatus;
            if container.is_missing() {
                return Some(substatus);
            }
            containers.remove(&name);
            None
        });
        substatus.map(missing_container)
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<ContainerName, NewContainer>) -> R) -> R {
        change(&mut self.containers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl NewContainer {
    /// Whether a request that arrives now still finds no container.
    fn is_missing(&mut self) -> bool {
        match &mut self.until {
            Until::Time(time) => self.created.elapsed() < *time,
            Until::Requests(0) => false,
            Until::Requests(left) => {
                *left -= 1;
                true
            }
        }
    }
}

fn missing_container(substatus: u32) -> Answer {
    let message = match substatus {
        1013 => "Collection is not yet available for read. Please retry in some time.",
        _ => "Owner resource does not exist.",
    };
    Answer::refusal(404, Some(substatus), message)
}

fn is_query(request: &Outgoing) -> bool {
    classify(request.method, &request.segments(), &request.headers) == RequestKind::Query
}

/// Limits the rows of a page. The client's own limit applies if it is lower. With -1 or without the header, the server
/// chooses the page size.
fn limit_page(request: &mut Outgoing, rows: u32) {
    let requested = header(&request.headers, &MAX_ITEM_COUNT).and_then(|text| text.trim().parse::<i64>().ok());
    let rows = i64::from(rows);
    let limit = requested.filter(|requested| *requested > 0).map_or(rows, |requested| requested.min(rows));
    request.headers.insert(MAX_ITEM_COUNT, limit.to_string());
}

fn refuse_item_request(details: &RequestDetails, status: u16, substatus: Option<u32>) -> Option<Answer> {
    (!details.kind.is_metadata()).then(|| Answer::refusal(status, substatus, access_message(status, substatus)))
}

/// Returns the service's message to a caller without access.
fn access_message(status: u16, substatus: Option<u32>) -> &'static str {
    match (status, substatus) {
        (403, Some(5202 | 5203)) => "Local Authorization is disabled. Use an AAD token to authorize all requests.",
        (403, Some(5300)) => {
            "Request blocked by Auth local : The given request cannot be authorized by AAD token in data plane. \
             Learn more: https://aka.ms/cosmos-native-rbac."
        }
        (403, Some(5301..=5303)) => {
            "Request blocked by Auth local : Request is blocked because principal [local] does not have required RBAC \
             permissions to perform action [Microsoft.DocumentDB/databaseAccounts/sqlDatabases/containers/items/read] \
             on the resource. Learn more: https://aka.ms/cosmos-native-rbac."
        }
        (403, Some(5307)) => "Request is blocked by the network security perimeter of the account.",
        (403, None) => {
            "Request originated from IP 127.0.0.1 through public internet. This is blocked by your Cosmos DB account \
             firewall settings. More info: https://aka.ms/cosmosdb-tsg-forbidden"
        }
        (403, _) => "Request is forbidden.",
        (_, Some(5005 | 5006)) => "The AAD token is not valid at the current time.",
        (_, Some(5201)) => "The groups of the principal could not be looked up.",
        _ => {
            "The input authorization token can't serve the request. The wrong key is being used or the expected \
             payload is not built as per the protocol."
        }
    }
}

fn refuse_query(request: &Outgoing, details: &RequestDetails, text: &str) -> Option<Answer> {
    let is_query = matches!(details.kind, RequestKind::Query | RequestKind::QueryPlan);
    let body = is_query.then(|| read_json(&request.body)).flatten()?;
    let query = body.get("query").and_then(Value::as_str)?;
    let message = format!(
        "Message: {{\"errors\":[{{\"severity\":\"Error\",\"code\":\"SC1001\",\"message\":\"Syntax error, incorrect \
         syntax near '{text}'.\"}}]}}"
    );
    query.contains(text).then(|| Answer::refusal(400, None, &message))
}

/// Refuses a request that has this header. If `value` is given, the header must have that value.
fn refuse_header(request: &Outgoing, name: &HeaderName, value: Option<&str>) -> Option<Answer> {
    let sent = header(&request.headers, name)?;
    let is_refused = value.is_none_or(|value| value.eq_ignore_ascii_case(sent));
    let message = format!("The value '{sent}' specified for the header '{}' is invalid.", name.as_str());
    is_refused.then(|| Answer::refusal(400, None, &message))
}
