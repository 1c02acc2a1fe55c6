//! A worker process of these tests, and the documents of the members.

use crate::fixture::*;
use duroxide::providers::{DispatcherCapabilityFilter, Provider, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Slot};
use serde_json::Value;
use std::{sync::Arc, time::Duration};
use tokio::{sync::mpsc, task::JoinHandle};

/// A configuration in which no poll finds work.
pub fn no_polls() -> CosmosDBProviderConfig {
    test_config().with_poll_interval(Duration::from_secs(3_600)).with_wakeup_interval(Duration::from_millis(50))
}

/// The name of a worker and the instance that it has fetched.
pub type Fetched = (String, String);

/// A worker process whose dispatchers wait.
pub struct Worker {
    pub provider: Arc<CosmosDBProvider>,
    pub waiting: Vec<JoinHandle<()>>,
}

/// The work that a dispatcher waits for.
pub enum Role {
    Turns(Option<DispatcherCapabilityFilter>),
    FetchedActivity(TagFilter, Option<SessionFetchConfig>),
}

impl Worker {
    /// Starts a worker with these roles. It sends its name and each instance that it fetches to `got`.
    pub async fn begin(
        fixture: &Fixture,
        name: &str,
        config: CosmosDBProviderConfig,
        roles: Vec<Role>,
        got: &mpsc::UnboundedSender<Fetched>,
    ) -> Self {
        let provider = Arc::new(fixture.provider_with(name, config).await);
        let waiting = roles.into_iter().map(|role| {
            let (provider, got, name) = (provider.clone(), got.clone(), name.to_owned());
            tokio::spawn(async move {
                loop {
                    let found = match &role {
                        Role::Turns(filter) => {
                            let turn = provider.fetch_orchestration_item(LONG, PATIENCE, filter.as_ref()).await;
                            turn.unwrap().map(|(turn, ..)| turn.instance)
                        }
                        Role::FetchedActivity(tags, session) => {
                            let work = provider.fetch_work_item(LONG, PATIENCE, session.as_ref(), tags).await;
                            work.unwrap().map(|(work, ..)| instance_of(&work))
                        }
                    };
                    if let Some(found) = found {
                        if got.send((name.clone(), found)).is_err() {
                            return;
                        }
                    }
                }
            })
        });
        let waiting = waiting.collect();
        Self { provider, waiting }
    }

    /// Stops the worker as a crash does.
    pub fn crash(self) {
        self.waiting.iter().for_each(JoinHandle::abort);
    }

    /// Stops the worker in an orderly way.
    pub async fn leave(self) {
        self.waiting.iter().for_each(JoinHandle::abort);
        assert!(self.provider.shutdown_within(PATIENCE).await);
    }
}

pub fn instance_of(work: &WorkItem) -> String {
    match work {
        WorkItem::ActivityExecute { instance, .. } => instance.clone(),
        other => panic!("{other:?}"),
    }
}

pub fn turns() -> Vec<Role> {
    vec![Role::Turns(None)]
}

/// A role that takes no work of a test.
pub fn nothing() -> Vec<Role> {
    work(TagFilter::Tags(["nothing".to_owned()].into()))
}

pub fn work(tags: TagFilter) -> Vec<Role> {
    vec![Role::FetchedActivity(tags, None)]
}

/// Waits until `settled` holds for the members' documents, and returns them.
pub async fn members(fixture: &Fixture, settled: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let looking = async {
        loop {
            let members = fixture.documents_of_type("$d:fleet", "member").await;
            if settled(&members) {
                return members;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let seen = tokio::time::timeout(PATIENCE, looking).await;
    match seen {
        Ok(members) => members,
        Err(_) => panic!("not settled: {:?}", fixture.documents_of_type("$d:fleet", "member").await),
    }
}

pub fn slots(member: &Value, queue: &str) -> Option<(u64, u64)> {
    let slots = member.get(queue)?.get("slots")?;
    Some((slots["from"].as_u64()?, slots["to"].as_u64()?))
}

/// Whether the members share the slots of a queue, and each slot has one member.
pub fn are_shared(members: &[Value], queue: &str, count: usize) -> bool {
    let mut ranges: Vec<(u64, u64)> = members.iter().filter_map(|member| slots(member, queue)).collect();
    ranges.sort_unstable();
    ranges.len() == count
        && ranges.first().is_some_and(|first| first.0 == 0)
        && ranges.last().is_some_and(|last| last.1 == 256)
        && ranges.windows(2).all(|pair| pair[0].1 == pair[1].0)
}

/// The name of an instance in this range of slots.
pub fn instance_in(range: (u64, u64), salt: &str) -> String {
    let names = (0..).map(|n| format!("{salt}{n}"));
    let is_in = |name: &String| (range.0..range.1).contains(&u64::from(Slot::of_instance(name).number()));
    names.into_iter().find(is_in).expect("a name for every slot")
}

pub async fn next(got: &mut mpsc::UnboundedReceiver<Fetched>) -> Fetched {
    tokio::time::timeout(PATIENCE, got.recv()).await.expect("a worker gets it").expect("members are there")
}
