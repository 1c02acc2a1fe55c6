//! An account with a fleet on it. Every process has a door of its own, so that what each one sends is told apart.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use duroxide_cosmos_emulator::{LocalAccount, Served, Stats};
use futures::future::try_join_all;
use futures::{stream, StreamExt};
use serde_json::{json, Value};

use super::looks::{Largest, Looks};
use super::starter::{Job, Starter};
use crate::measure::Reading;
use crate::processes::{Done, Worker};
use crate::scene::{Setting, Which};

/// Both providers' defaults.
const DATABASE: &str = "duroxide";
const CONTAINER: &str = "duroxide";

const CLIENT: &str = "client";

/// How long the first orchestrations may take.
const WARM_UP: Duration = Duration::from_secs(30);

/// An account, the client process and the worker processes on it.
pub struct Site {
    /// The client process.
    pub client: Starter,
    /// The worker processes.
    pub crew: Crew,
    which: Which,
    account: LocalAccount,
    looks: Arc<Mutex<Looks>>,
    doors: Vec<Served>,
}

/// Worker processes, by the names that the account knows them by.
#[derive(Default)]
pub struct Crew {
    workers: Vec<(String, Worker)>,
}

impl Crew {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// What each has done so far.
    pub async fn done(&mut self) -> Result<Vec<Done>> {
        let mut done = Vec::new();
        for (_, worker) in &mut self.workers {
            done.push(worker.done().await?);
        }
        Ok(done)
    }

    /// Ends the last one as a crash does.
    pub async fn crash_last(&mut self) -> Result<()> {
        let (_, worker) = self.workers.pop().context("there is no worker")?;
        worker.kill().await
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.workers.iter().map(|(name, _)| name.as_str())
    }
}

impl Site {
    /// An account with the container and a client process. No worker yet.
    pub async fn open(which: Which, setting: Setting) -> Result<Self> {
        let account = setting.account();
        let looks = Arc::<Mutex<Looks>>::default();
        let looking = Arc::clone(&looks);
        account.wire().observe(move |request, answer| {
            looking.lock().unwrap_or_else(PoisonError::into_inner).note(request, answer);
        });
        let door = account.serve_client(([127, 0, 0, 1], 0).into(), CLIENT).await.context("no port is free")?;
        let client = Starter::start(which, &door.endpoint()).await?;
        Ok(Self { client, which, account, looks, doors: vec![door], crew: Crew::default() })
    }

    /// Adds worker processes; each is up when this returns.
    pub async fn employ(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            let name = format!("worker-{}", self.doors.len());
            let door = self.account.serve_client(([127, 0, 0, 1], 0).into(), &name).await?;
            self.crew.workers.push((name, Worker::start(self.which, &door.endpoint()).await?));
            self.doors.push(door);
        }
        Ok(())
    }

    /// Runs a greeting for each worker, so that connections are open, and lets the fleet come to rest.
    pub async fn settle(&mut self, rest: Duration) -> Result<()> {
        let greetings = self.crew.len().max(2) as u64;
        let runs = self.client.burst(Job::new("warm", "Hello", ""), greetings, WARM_UP).await?;
        ensure!(runs.iter().all(|run| run.ended.is_some()), "a greeting does not end");
        tokio::time::sleep(rest).await;
        Ok(())
    }

    /// What the workers sent so far; the client's own is not in it.
    pub fn reading(&self) -> Reading {
        let stats = self.crew.names().map(|name| self.account.stats_of(name));
        Reading::of(stats.fold(Stats::default(), std::ops::Add::add))
    }

    /// The largest look at the queues since this was last asked.
    pub fn largest_look(&self) -> Largest {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Multiplies the timers that the client has put, `put` of them: each `times` as many, in the same instances. As
    /// `padding` they are all nobody's work.
    ///
    /// They are copies of what the provider wrote, so that this needs to know no provider's documents: of the kinds of which
    /// there is one for each timer, with ids of their own.
    pub async fn multiply_timers(&self, put: u64, times: u64, padding: bool) -> Result<()> {
        let is_timers = |document: &Value| document["instanceId"].as_str().is_some_and(|id| id.starts_with("timer-"));
        let mut kinds: HashMap<String, Vec<Value>> = HashMap::new();
        for document in self.account.documents(DATABASE, CONTAINER).into_iter().filter(is_timers) {
            kinds.entry(document["type"].to_string()).or_default().push(document);
        }
        kinds.retain(|_, documents| documents.len() as u64 >= put);
        ensure!(!kinds.is_empty(), "no kind of document is as many as the timers, which are {put}");
        // Where they are padding, what the provider wrote is overwritten too.
        let first = u64::from(!padding);
        let copies = kinds.values().flatten().flat_map(|document| (first..times).map(move |copy| (document, copy)));
        let taken = stream::iter(copies)
            .map(|(document, copy)| self.put(copied(document, copy, padding)))
            .buffer_unordered(16)
            .all(std::future::ready)
            .await;
        ensure!(taken, "the account does not take a copy of a timer");
        Ok(())
    }

    async fn put(&self, document: Value) -> bool {
        let partition = document["instanceId"].as_str().unwrap_or_default();
        self.account.put(DATABASE, CONTAINER, partition, &document).await
    }

    /// Ends the processes.
    pub async fn close(self) -> Result<()> {
        try_join_all(self.crew.workers.into_iter().map(|(_, worker)| worker.stop())).await?;
        drop(self.client);
        for door in self.doors {
            door.shutdown().await;
        }
        Ok(())
    }
}

/// A copy with an id of its own, or number 0: the document itself. The number comes last, since an id may tell an order.
fn copied(document: &Value, copy: u64, padding: bool) -> Value {
    let mut copied = document.clone();
    if let Some(fields) = copied.as_object_mut() {
        // What the service itself adds.
        fields.retain(|name, _| !name.starts_with('_'));
    }
    if copy > 0 {
        copied["id"] = json!(format!("{}~{copy}", document["id"].as_str().unwrap_or_default()));
    }
    if padding {
        copied["type"] = json!("padding");
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_an_id_of_its_own_and_nothing_of_the_services() {
        let document = json!({ "id": "m1", "instanceId": "timer-1", "type": "message", "_etag": "x" });
        let copy = json!({ "id": "m1~3", "instanceId": "timer-1", "type": "message" });
        assert_eq!(copied(&document, 3, false), copy);
        assert_eq!(copied(&document, 0, true), json!({ "id": "m1", "instanceId": "timer-1", "type": "padding" }));
    }
}
