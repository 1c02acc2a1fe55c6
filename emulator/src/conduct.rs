//! How the account behaves at one moment: what the misbehaviours that are on do to a request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use azure_core::http::headers::HeaderName;
use azure_core::http::Method;
use serde_json::Value;

use crate::answer::Answer;
use crate::misbehaviour::{Misbehaviour, Until};
use crate::request::{classify, header, read_json, Facts, Outgoing, RequestKind, READ_STRATEGY};
use crate::service::ContainerName;

const MAX_ITEM_COUNT: HeaderName = HeaderName::from_static("x-ms-max-item-count");
const PREFER: HeaderName = HeaderName::from_static("prefer");
const CONTENT_RESPONSE: HeaderName = HeaderName::from_static("x-ms-cosmos-populate-content-response-on-write");
const ENABLE_SCAN: HeaderName = HeaderName::from_static("x-ms-documentdb-query-enable-scan");
const PRIORITY: HeaderName = HeaderName::from_static("x-ms-cosmos-priority-level");

/// The misbehaviours that are on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conduct {
    active: Vec<Arc<Misbehaviour>>,
}

impl Conduct {
    pub fn new(active: Vec<Arc<Misbehaviour>>) -> Self {
        Self { active }
    }

    /// Whether none is on.
    pub fn is_good(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether one without a value is on.
    pub fn is(&self, misbehaviour: &Misbehaviour) -> bool {
        self.active.iter().any(|active| **active == *misbehaviour)
    }

    /// Whether items expire.
    pub fn honours_time_to_live(&self) -> bool {
        !self.is(&Misbehaviour::NoTimeToLive)
    }

    /// Their names with their values.
    pub fn names(&self) -> Vec<String> {
        self.active.iter().map(ToString::to_string).collect()
    }

    /// How much dearer or cheaper everything is.
    pub fn charge_factor(&self) -> f64 {
        let factor = |misbehaviour: &Misbehaviour| match misbehaviour {
            Misbehaviour::ChargesTimes(factor) => Some(*factor),
            _ => None,
        };
        self.each(factor).product()
    }

    /// How long a query page takes on top.
    pub fn page_time(&self) -> Duration {
        let time = |misbehaviour: &Misbehaviour| match misbehaviour {
            Misbehaviour::SlowPages(time) => Some(*time),
            _ => None,
        };
        self.each(time).sum()
    }

    /// Changes what the request asks for.
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

    /// The refusal of a request that a well-behaved account would answer.
    pub fn refusal(&self, request: &Outgoing, facts: &Facts, fresh: &FreshContainers) -> Option<Answer> {
        self.active.iter().find_map(|misbehaviour| match &**misbehaviour {
            Misbehaviour::Forbidden(substatus) => refuse_item_request(facts, 403, *substatus),
            Misbehaviour::Unauthorized(substatus) => refuse_item_request(facts, 401, *substatus),
            Misbehaviour::NewContainersMissing { .. } => fresh.refusal(request),
            Misbehaviour::RefuseQuery(text) => refuse_query(request, facts, text),
            Misbehaviour::RefusePriority => refuse_header(request, &PRIORITY, None),
            Misbehaviour::RefuseLatestCommitted => refuse_header(request, &READ_STRATEGY, Some("LatestCommitted")),
            _ => None,
        })
    }

    /// Remembers a container that was just created, if those are missing for a while.
    pub fn note_created(&self, request: &Outgoing, facts: &Facts, answer: &Answer, fresh: &FreshContainers) {
        let is_created = facts.kind == RequestKind::Container && request.method == Method::Post && answer.status == 201;
        let missing = self.each(|misbehaviour| match misbehaviour {
            Misbehaviour::NewContainersMissing { substatus, until } => Some((*substatus, *until)),
            _ => None,
        });
        if let (true, Some((substatus, until))) = (is_created, missing.last()) {
            fresh.add(request, substatus, until);
        }
    }

    fn each<'a, R>(&'a self, pick: impl Fn(&Misbehaviour) -> Option<R> + 'a) -> impl Iterator<Item = R> + 'a {
        self.active.iter().filter_map(move |misbehaviour| pick(misbehaviour))
    }
}

/// Containers that are answered 404 for a while although they were created.
#[derive(Debug, Default)]
pub(crate) struct FreshContainers {
    containers: Mutex<HashMap<ContainerName, Fresh>>,
}

#[derive(Debug)]
struct Fresh {
    substatus: u32,
    created: Instant,
    until: Until,
}

impl FreshContainers {
    fn add(&self, request: &Outgoing, substatus: u32, until: Until) {
        let id = read_json(&request.body).and_then(|body| body["id"].as_str().map(str::to_owned));
        let (Some(container), Some(database)) = (id, request.segments().into_iter().nth(1)) else { return };
        let name = ContainerName { database, container };
        let fresh = Fresh { substatus, created: Instant::now(), until };
        self.with(|containers| containers.insert(name, fresh));
    }

    fn refusal(&self, request: &Outgoing) -> Option<Answer> {
        let name = ContainerName::of(request)?;
        let substatus = self.with(|containers| {
            let fresh = containers.get_mut(&name)?;
            let substatus = fresh.substatus;
            if fresh.is_missing() {
                return Some(substatus);
            }
            containers.remove(&name);
            None
        });
        substatus.map(missing_container)
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<ContainerName, Fresh>) -> R) -> R {
        change(&mut self.containers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Fresh {
    /// Whether a request that comes now still finds no container.
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

/// The client's own limit holds where it is lower; -1 and no header leave the size of the page to the server.
fn limit_page(request: &mut Outgoing, rows: u32) {
    let asked = header(&request.headers, &MAX_ITEM_COUNT).and_then(|text| text.trim().parse::<i64>().ok());
    let rows = i64::from(rows);
    let limit = asked.filter(|asked| *asked > 0).map_or(rows, |asked| asked.min(rows));
    request.headers.insert(MAX_ITEM_COUNT, limit.to_string());
}

fn refuse_item_request(facts: &Facts, status: u16, substatus: Option<u32>) -> Option<Answer> {
    (!facts.kind.is_metadata()).then(|| Answer::refusal(status, substatus, access_message(status, substatus)))
}

/// What the service says to a caller without access.
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

fn refuse_query(request: &Outgoing, facts: &Facts, text: &str) -> Option<Answer> {
    let is_query = matches!(facts.kind, RequestKind::Query | RequestKind::QueryPlan);
    let body = is_query.then(|| read_json(&request.body)).flatten()?;
    let query = body.get("query").and_then(Value::as_str)?;
    let message = format!(
        "Message: {{\"errors\":[{{\"severity\":\"Error\",\"code\":\"SC1001\",\"message\":\"Syntax error, incorrect \
         syntax near '{text}'.\"}}]}}"
    );
    query.contains(text).then(|| Answer::refusal(400, None, &message))
}

/// Refuses a request that has this header, with this value if one is given.
fn refuse_header(request: &Outgoing, name: &HeaderName, value: Option<&str>) -> Option<Answer> {
    let sent = header(&request.headers, name)?;
    let is_refused = value.is_none_or(|value| value.eq_ignore_ascii_case(sent));
    let message = format!("The value '{sent}' specified for the header '{}' is invalid.", name.as_str());
    is_refused.then(|| Answer::refusal(400, None, &message))
}
