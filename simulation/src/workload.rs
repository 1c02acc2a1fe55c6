//! The workload of clients, and the outcome that each instance must have.

use std::sync::Arc;
use std::time::Duration;

use duroxide::providers::PruneOptions;
use duroxide::runtime::OrchestrationStatus;
use duroxide::{Client, ClientError, ErrorDetails};

use crate::audit::OUTCOME;
use crate::bank::{self, AccountDelivery, AccountMessage, BankWorkload};
use crate::oracle::{Oracle, Violation};
use crate::script::{self, QueueDelivery, ScriptEnding, ScriptInput, Step, QUEUE, SCRIPT};
use crate::transcript::{Transcript, ITEM_COMPLETED};
use crate::worker::UNKNOWN;

/// One item of a workload.
#[derive(Clone, Debug)]
pub enum WorkloadItem {
    /// Runs a script to its end.
    Run(Vec<Step>),
    /// Starts a script that does not end by itself, and cancels it.
    Cancel {
        /// The script. Its last step waits for an event that never comes.
        steps: Vec<Step>,
        /// The time until the cancellation.
        after: Duration,
    },
    /// Runs a script to its end, deletes the instance, and runs another script under the same name.
    DeleteAndRunAgain(Vec<Step>, Vec<Step>),
    /// Starts a script, and deletes the instance by force while it may be running.
    DeleteRunning {
        /// The script. It has no children.
        steps: Vec<Step>,
        /// The time until the deletion.
        after: Duration,
    },
    /// Runs a script to its end, and prunes all executions but the last.
    Prune(Vec<Step>),
    /// Runs a script that continues as new repeatedly, and prunes its executions meanwhile and at the end.
    Chain {
        /// The script.
        steps: Vec<Step>,
        /// The time between two prunings.
        pause: Duration,
    },
    /// Runs one script after the other under the same name, each as soon as the instance before it is deleted. An
    /// administrator or this client deletes the ended instance.
    Restart(Vec<Vec<Step>>),
    /// Starts an orchestration that no worker has registered.
    Poison,
    /// Transfers amounts between accounts.
    Bank(BankWorkload),
}

/// The outcome that an instance must have at the end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedOutcome {
    /// It has this end and this custom status.
    Ended(ScriptEnding, Option<String>),
    /// It was cancelled.
    Cancelled,
    /// It failed as poison.
    Poisoned,
    /// It completed with this balance as its output.
    Balance(i64),
    /// It is deleted, with all its documents.
    Absent,
}

impl WorkloadItem {
    /// The instances that it leaves, each with its expected outcome.
    pub fn expected_outcomes(&self, name: &str) -> Vec<(String, ExpectedOutcome)> {
        match self {
            Self::Run(steps) | Self::Prune(steps) | Self::Chain { steps, .. } => ended(name, steps),
            Self::DeleteAndRunAgain(_, steps) => ended(name, steps),
            Self::Cancel { .. } => vec![(name.to_owned(), ExpectedOutcome::Cancelled)],
            Self::DeleteRunning { .. } | Self::Restart(_) => vec![(name.to_owned(), ExpectedOutcome::Absent)],
            Self::Poison => vec![(name.to_owned(), ExpectedOutcome::Poisoned)],
            Self::Bank(bank) => {
                let accounts = 0..bank.accounts;
                accounts.map(|n| (bank.instance(n), ExpectedOutcome::Balance(bank.balance(n)))).collect()
            }
        }
    }
}

/// The expected outcomes of a script and of the orchestrations that it starts without waiting for them.
fn ended(name: &str, steps: &[Step]) -> Vec<(String, ExpectedOutcome)> {
    let outcome = |steps: &[Step]| {
        ExpectedOutcome::Ended(script::ending(steps), script::last_status(steps).map(ToOwned::to_owned))
    };
    let mut outcomes = vec![(name.to_owned(), outcome(steps))];
    outcomes.extend(script::detached(name, steps).into_iter().map(|(id, steps)| (id, outcome(&steps))));
    outcomes
}

/// The time between two attempts of a client.
const PAUSE: Duration = Duration::from_millis(700);

/// A client that runs workload items.
#[derive(Clone)]
pub struct WorkloadClient {
    /// The duroxide client.
    pub client: Arc<Client>,
    /// The transcript of the run.
    pub transcript: Arc<Transcript>,
    /// The oracle of the run.
    pub oracle: Arc<Oracle>,
}

impl WorkloadClient {
    /// Runs one item, and repeats each call until it succeeds.
    pub async fn run(&self, name: &str, item: &WorkloadItem) {
        match item {
            WorkloadItem::Run(steps) => self.script(name, steps).await,
            WorkloadItem::Prune(steps) => {
                self.script(name, steps).await;
                self.until_pruned(name).await;
            }
            WorkloadItem::Chain { steps, pause } => {
                tokio::select! {
                    biased;
                    () = self.script(name, steps) => {}
                    () = self.prune_repeatedly(name, *pause) => {}
                }
                self.until_pruned(name).await;
            }
            WorkloadItem::Restart(scripts) => {
                self.oracle.will_be_deleted(name);
                for steps in scripts {
                    let before = self.start(name, SCRIPT, &ScriptInput::begin(steps)).await;
                    self.until_ended(name, before).await;
                    self.until_deleted(name, before).await;
                }
            }
            WorkloadItem::DeleteAndRunAgain(first, second) => {
                self.script(name, first).await;
                self.delete(name, false).await;
                self.script(name, second).await;
            }
            WorkloadItem::Cancel { steps, after } => {
                let before = self.start(name, SCRIPT, &ScriptInput::begin(steps)).await;
                tokio::time::sleep(*after).await;
                self.until_ok(name, "cancel", || self.client.cancel_instance(name, "enough")).await;
                self.until_ended(name, before).await;
            }
            WorkloadItem::DeleteRunning { steps, after } => {
                let before = self.start(name, SCRIPT, &ScriptInput::begin(steps)).await;
                self.until_begun(name, before).await;
                tokio::time::sleep(*after).await;
                self.delete(name, true).await;
            }
            WorkloadItem::Poison => {
                let before = self.start(name, UNKNOWN, "").await;
                self.until_ended(name, before).await;
            }
            WorkloadItem::Bank(bank) => self.bank(bank).await,
        }
        self.transcript.record("client", Some(name), ITEM_COMPLETED);
    }

    async fn script(&self, name: &str, steps: &[Step]) {
        let before = self.start(name, SCRIPT, &ScriptInput::begin(steps)).await;
        let feeding = async {
            for number in 0..script::queue_messages(steps) {
                let delivery = || serde_json::to_string(&QueueDelivery { number, nonce: nonce() }).expect("plain data");
                self.until_ok(name, "enqueue", || self.client.enqueue_event(name, QUEUE, delivery())).await;
            }
        };
        let events = script::events(steps);
        let raising = async {
            // duroxide drops an event that no step waits for. So the client raises it until the script has ended.
            while !events.is_empty() {
                for event in &events {
                    let raised = self.client.raise_event(name, event, format!("{}", nonce())).await;
                    self.transcript.record("client", Some(name), format!("raises {event}: {raised:?}"));
                }
                tokio::time::sleep(PAUSE * 3).await;
            }
            std::future::pending::<()>().await;
        };
        let ending = async {
            feeding.await;
            self.until_ended(name, before).await;
        };
        tokio::select! {
            biased;
            () = ending => {}
            () = raising => {}
        }
    }

    async fn bank(&self, bank: &BankWorkload) {
        let accounts = || (0..bank.accounts).map(|n| bank.instance(n));
        let mut started = Vec::new();
        for account in accounts() {
            let before = self.start(&account, bank::ACCOUNT, &bank::AccountState::opening()).await;
            started.push((account, before));
        }
        for (number, transfer) in bank.transfers.iter().enumerate() {
            let to = bank.instance(transfer.to);
            let message = AccountMessage::Transfer { number, to, amount: transfer.amount };
            self.send(&bank.instance(transfer.from), &message).await;
        }
        for n in 0..bank.accounts {
            self.send(&bank.instance(n), &bank.closing(n)).await;
        }
        for (account, before) in started {
            self.until_ended(&account, before).await;
        }
    }

    async fn send(&self, account: &str, message: &AccountMessage) {
        let delivery = || {
            let delivery = AccountDelivery { nonce: nonce(), message: message.clone() };
            serde_json::to_string(&delivery).expect("plain data")
        };
        self.until_ok(account, "enqueue", || self.client.enqueue_event(account, QUEUE, delivery())).await;
    }

    /// Starts an instance. Returns the number of deleted instances of this name before it.
    async fn start(&self, name: &str, orchestration: &str, input: &str) -> usize {
        let before = self.oracle.deletions.times(name);
        self.until_ok(name, "start", || self.client.start_orchestration(name, orchestration, input)).await;
        before
    }

    async fn prune_repeatedly(&self, name: &str, pause: Duration) {
        loop {
            tokio::time::sleep(pause).await;
            let keep_last = [None, Some(0), Some(1), Some(2)][fastrand::usize(..4)];
            let pruned =
                self.client.prune_executions(name, PruneOptions { keep_last, ..PruneOptions::default() }).await;
            self.transcript.record("client", Some(name), format!("prunes all but {keep_last:?}: {pruned:?}"));
        }
    }

    /// Prunes all executions but the last.
    async fn until_pruned(&self, name: &str) {
        let pruned = || async {
            let options = PruneOptions { keep_last: Some(1), ..PruneOptions::default() };
            match self.client.prune_executions(name, options).await {
                // Retention has already deleted the instance.
                Err(_) if self.oracle.deletions.times(name) > 0 => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Ok(()),
            }
        };
        self.until_ok(name, "prune", pruned).await;
    }

    /// Waits until an administrator has deleted the ended instance, or deletes it, at once or after a while.
    async fn until_deleted(&self, name: &str, before: usize) {
        let interval = Duration::from_millis(20);
        let mut waits = if fastrand::bool() { 0 } else { 500 };
        while self.oracle.deletions.times(name) == before {
            if waits == 0 {
                let deleted = self.client.delete_instance(name, false).await;
                self.transcript.record("client", Some(name), format!("deletes the ended instance: {deleted:?}"));
            }
            waits = u32::saturating_sub(waits, 1);
            tokio::time::sleep(interval).await;
        }
    }

    async fn delete(&self, name: &str, force: bool) {
        // Every delayed request of the instance has arrived by then.
        tokio::time::sleep(Duration::from_secs(15)).await;
        self.oracle.will_be_deleted(name);
        if force {
            self.oracle.deletions.will_be_forced(name);
        }
        let deleted = || async {
            match self.client.delete_instance(name, force).await {
                // An earlier call of this client has deleted the instance, and its answer was lost.
                Err(ClientError::InstanceNotFound { .. }) => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Ok(()),
            }
        };
        self.until_ok(name, "delete", deleted).await;
    }

    /// Waits until an instance has begun, or retention has deleted it. `before` is the number of deleted instances of
    /// this name before it.
    async fn until_begun(&self, name: &str, before: usize) {
        while self.oracle.deletions.times(name) == before
            && matches!(self.client.get_orchestration_status(name).await, Ok(OrchestrationStatus::NotFound) | Err(_))
        {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until an instance has ended, or retention has deleted it. `before` is the number of deleted instances of
    /// this name before it.
    async fn until_ended(&self, name: &str, before: usize) {
        while self.oracle.deletions.times(name) == before {
            let status = self.client.get_orchestration_status(name).await;
            match status {
                Ok(OrchestrationStatus::Completed { .. } | OrchestrationStatus::Failed { .. }) => return,
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Repeats a call until it succeeds.
    async fn until_ok<T, F>(&self, name: &str, operation: &str, mut call: impl FnMut() -> F)
    where
        F: std::future::Future<Output = Result<T, ClientError>>,
    {
        loop {
            match call().await {
                Ok(_) => return self.transcript.record("client", Some(name), format!("{operation}: done")),
                Err(error) => self.transcript.record("client", Some(name), format!("{operation}: {error}")),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// A unique number.
fn nonce() -> u64 {
    fastrand::u64(..1 << 50)
}

impl ExpectedOutcome {
    /// The status of an instance with this outcome. `None`: the instance is deleted.
    pub fn status(&self) -> Option<&'static str> {
        match self {
            Self::Ended(ScriptEnding::Output(_), _) | Self::Balance(_) => Some("Completed"),
            Self::Ended(..) | Self::Cancelled | Self::Poisoned => Some("Failed"),
            Self::Absent => None,
        }
    }

    /// The violation if an instance with this expected outcome has another status.
    pub fn violation(&self, instance: &str, status: &OrchestrationStatus) -> Option<Violation> {
        let is_expected = match (self, status) {
            (
                Self::Ended(ScriptEnding::Output(wanted), about),
                OrchestrationStatus::Completed { output, custom_status, .. },
            ) => wanted == output && about == custom_status,
            (Self::Ended(ScriptEnding::Failure, about), OrchestrationStatus::Failed { details, custom_status, .. }) => {
                details.display_message().contains(script::TOLD_TO_FAIL) && about == custom_status
            }
            // The whole turn fails if it can't be stored. Its custom status is not stored either.
            (Self::Ended(ScriptEnding::TooLarge, _), OrchestrationStatus::Failed { details, .. }) => {
                !matches!(details, ErrorDetails::Poison { .. })
            }
            (Self::Balance(wanted), OrchestrationStatus::Completed { output, .. }) => *output == wanted.to_string(),
            (Self::Cancelled, OrchestrationStatus::Failed { details, .. }) => {
                matches!(details, ErrorDetails::Application { kind: duroxide::AppErrorKind::Cancelled { .. }, .. })
            }
            (Self::Poisoned, OrchestrationStatus::Failed { details, .. }) => {
                matches!(details, ErrorDetails::Poison { .. })
            }
            (Self::Absent, OrchestrationStatus::NotFound) => true,
            _ => false,
        };
        (!is_expected).then(|| Violation {
            invariant: OUTCOME,
            instance: instance.to_owned(),
            detail: format!("wanted {self:?}, found {status:?}"),
        })
    }
}
