//! An account with a fleet. Every process has a separate address, so that the account can count its requests
//! separately.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use duroxide_cosmos_emulator::{LocalAccount, Served, Stats};
use futures::future::try_join_all;
use futures::{stream, StreamExt};
use serde_json::{json, Value};

use super::client_process::{ClientProcess, Job};
use super::polls::{LargestSizes, PollSizes};
use crate::fixture::{ProviderKind, Setting};
use crate::measure::Reading;
use crate::processes::{WorkDone, WorkerProcess};

/// Both providers use these names by default.
const DATABASE: &str = "duroxide";
const CONTAINER: &str = "duroxide";

const CLIENT: &str = "client";

/// How long the warm-up orchestrations may take.
const WARM_UP: Duration = Duration::from_secs(30);

/// An account, the client process and the worker processes on it.
pub struct FleetFixture {
    /// The client process.
    pub client: ClientProcess,
    /// The worker processes.
    pub workers: WorkerProcesses,
    kind: ProviderKind,
    account: LocalAccount,
    polls: Arc<Mutex<PollSizes>>,
    servers: Vec<Served>,
}

/// Worker processes, with the names under which the account counts their requests.
#[derive(Default)]
pub struct WorkerProcesses {
    processes: Vec<(String, WorkerProcess)>,
}

impl WorkerProcesses {
    /// Returns the number of workers.
    pub fn len(&self) -> usize {
        self.processes.len()
    }

    /// Returns the work of each worker so far.
    pub async fn done(&mut self) -> Result<Vec<WorkDone>> {
        let mut done = Vec::new();
        for (_, worker) in &mut self.processes {
            done.push(worker.done().await?);
        }
        Ok(done)
    }

    /// Kills the last worker, like a crash.
    pub async fn kill_last(&mut self) -> Result<()> {
        let (_, worker) = self.processes.pop().context("no worker is running")?;
        worker.kill().await
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.processes.iter().map(|(name, _)| name.as_str())
    }
}

impl FleetFixture {
    /// Creates an account with the container and a client process, without workers.
    pub async fn open(kind: ProviderKind, setting: Setting) -> Result<Self> {
        let account = setting.account();
        let polls = Arc::<Mutex<PollSizes>>::default();
        let recorder = Arc::clone(&polls);
        account.wire().observe(move |request, answer| {
            recorder.lock().unwrap_or_else(PoisonError::into_inner).record(request, answer);
        });
        let server =
            account.serve_client(([127, 0, 0, 1], 0).into(), CLIENT).await.context("no loopback port is free")?;
        let client = ClientProcess::start(kind, &server.endpoint()).await?;
        Ok(Self { client, kind, account, polls, servers: vec![server], workers: WorkerProcesses::default() })
    }

    /// Adds worker processes and waits until each is ready.
    pub async fn start_workers(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            let name = format!("worker-{}", self.servers.len());
            let server = self.account.serve_client(([127, 0, 0, 1], 0).into(), &name).await?;
            self.workers.processes.push((name, WorkerProcess::start(self.kind, &server.endpoint()).await?));
            self.servers.push(server);
        }
        Ok(())
    }

    /// Runs a Hello for each worker, so that connections are open, then lets the fleet idle.
    pub async fn settle(&mut self, rest: Duration) -> Result<()> {
        let hellos = self.workers.len().max(2) as u64;
        let runs = self.client.burst(Job::new("warm", "Hello", ""), hellos, WARM_UP).await?;
        ensure!(runs.iter().all(|run| run.ended.is_some()), "a warm-up orchestration did not end");
        tokio::time::sleep(rest).await;
        Ok(())
    }

    /// Returns the counters of the workers so far, without those of the client.
    pub fn reading(&self) -> Reading {
        let stats = self.workers.names().map(|name| self.account.stats_of(name));
        Reading::of(stats.fold(Stats::default(), std::ops::Add::add))
    }

    /// Returns the sizes of the largest poll since the last call.
    pub fn largest_poll(&self) -> LargestSizes {
        self.polls.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Copies the timers that the client has enqueued, `put` of them, so that there are `times` as many in the same
    /// instances. With `padding`, all copies become padding documents and the originals too.
    ///
    /// The copies are made from the documents of the provider, so this function needs no knowledge of their format. It
    /// copies the types of documents of which there is one for each timer, with new ids.
    pub async fn multiply_timers(&self, put: u64, times: u64, padding: bool) -> Result<()> {
        let is_timers = |document: &Value| document["instanceId"].as_str().is_some_and(|id| id.starts_with("timer-"));
        let mut kinds: HashMap<String, Vec<Value>> = HashMap::new();
        for document in self.account.documents(DATABASE, CONTAINER).into_iter().filter(is_timers) {
            kinds.entry(document["type"].to_string()).or_default().push(document);
        }
        kinds.retain(|_, documents| documents.len() as u64 >= put);
        ensure!(!kinds.is_empty(), "no type of document has one document for each of the {put} timers");
        // For padding, the documents of the provider are overwritten too.
        let first = u64::from(!padding);
        let copies = kinds.values().flatten().flat_map(|document| (first..times).map(move |copy| (document, copy)));
        let taken = stream::iter(copies)
            .map(|(document, copy)| self.put(copied(document, copy, padding)))
            .buffer_unordered(16)
            .all(std::future::ready)
            .await;
        ensure!(taken, "the account refused a copy of a timer");
        Ok(())
    }

    async fn put(&self, document: Value) -> bool {
        let partition = document["instanceId"].as_str().unwrap_or_default();
        self.account.put(DATABASE, CONTAINER, partition, &document).await
    }

    /// Stops the processes and the servers.
    pub async fn close(self) -> Result<()> {
        try_join_all(self.workers.processes.into_iter().map(|(_, worker)| worker.stop())).await?;
        drop(self.client);
        for server in self.servers {
            server.shutdown().await;
        }
        Ok(())
    }
}

/// Copies a document with a new id. Copy 0 has the original id. The number is a suffix, because the order of ids may
/// matter.
fn copied(document: &Value, copy: u64, padding: bool) -> Value {
    let mut copied = document.clone();
    if let Some(fields) = copied.as_object_mut() {
        // The service adds these properties itself.
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
    fn a_copy_has_a_new_id_and_no_system_properties() {
        let document = json!({ "id": "m1", "instanceId": "timer-1", "type": "message", "_etag": "x" });
        let copy = json!({ "id": "m1~3", "instanceId": "timer-1", "type": "message" });
        assert_eq!(copied(&document, 3, false), copy);
        assert_eq!(copied(&document, 0, true), json!({ "id": "m1", "instanceId": "timer-1", "type": "padding" }));
    }
}
