//! What clients want done, and how it must end.

use std::sync::Arc;
use std::time::Duration;

use duroxide::providers::PruneOptions;
use duroxide::runtime::OrchestrationStatus;
use duroxide::{Client, ClientError, ErrorDetails};

use crate::bank::{self, Business, Letter, Message};
use crate::ledger::{Broken, Ledger};
use crate::script::{self, Ending, Input, Parcel, Step, QUEUE, SCRIPT};
use crate::story::{Story, ERRAND_DONE};
use crate::worker::UNKNOWN;

/// What a client does.
#[derive(Clone, Debug)]
pub enum Errand {
    /// Runs a script to its end.
    Run(Vec<Step>),
    /// Starts a script that never ends, and cancels it.
    Cancel {
        /// It waits for what never comes in the end.
        steps: Vec<Step>,
        /// After how long it is cancelled.
        after: Duration,
    },
    /// Runs a script to its end, deletes it, and runs another one of the same name.
    DeleteAndRunAgain(Vec<Step>, Vec<Step>),
    /// Starts a script, and deletes it by force while it may be running.
    DeleteRunning {
        /// It has no children.
        steps: Vec<Step>,
        /// After how long.
        after: Duration,
    },
    /// Runs a script to its end and prunes its executions but the last.
    Prune(Vec<Step>),
    /// Runs a script that continues as new again and again, and prunes its executions meanwhile and at the end.
    Chain {
        /// What it does.
        steps: Vec<Step>,
        /// How long it is between two prunings.
        pause: Duration,
    },
    /// Runs one script after the other under the same name, each as soon as the one before it is deleted: by an administrator who
    /// deletes whatever of this name has ended, or by this client.
    Restart(Vec<Vec<Step>>),
    /// Starts what no worker knows.
    Poison,
    /// Moves money.
    Bank(Business),
}

/// What must be there when all is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It has ended like this, with this custom status.
    Ended(Ending, Option<String>),
    /// It was cancelled.
    Cancelled,
    /// It was given up as poison.
    Poisoned,
    /// It has ended with this output.
    Balance(i64),
    /// It is gone, with all its documents.
    Gone,
}

impl Errand {
    /// The instances that it leaves, and how each must have ended.
    pub fn fates(&self, name: &str) -> Vec<(String, Fate)> {
        match self {
            Self::Run(steps) | Self::Prune(steps) | Self::Chain { steps, .. } => ended(name, steps),
            Self::DeleteAndRunAgain(_, steps) => ended(name, steps),
            Self::Cancel { .. } => vec![(name.to_owned(), Fate::Cancelled)],
            Self::DeleteRunning { .. } | Self::Restart(_) => vec![(name.to_owned(), Fate::Gone)],
            Self::Poison => vec![(name.to_owned(), Fate::Poisoned)],
            Self::Bank(business) => {
                let accounts = 0..business.accounts;
                accounts.map(|n| (business.instance(n), Fate::Balance(business.balance(n)))).collect()
            }
        }
    }
}

fn ended(name: &str, steps: &[Step]) -> Vec<(String, Fate)> {
    let fate = |steps: &[Step]| Fate::Ended(script::ending(steps), script::last_status(steps).map(ToOwned::to_owned));
    let mut fates = vec![(name.to_owned(), fate(steps))];
    fates.extend(script::detached(name, steps).into_iter().map(|(id, steps)| (id, fate(&steps))));
    fates
}

/// How long a client waits before it tries again.
const PAUSE: Duration = Duration::from_millis(700);

/// A client with its errands.
#[derive(Clone)]
pub struct Errands {
    /// The client.
    pub client: Arc<Client>,
    /// What is told of it.
    pub story: Arc<Story>,
    /// Where broken promises go.
    pub ledger: Arc<Ledger>,
}

impl Errands {
    /// Does one errand, whatever it takes.
    pub async fn run(&self, name: &str, errand: &Errand) {
        match errand {
            Errand::Run(steps) => self.script(name, steps).await,
            Errand::Prune(steps) => {
                self.script(name, steps).await;
                self.until_pruned(name).await;
            }
            Errand::Chain { steps, pause } => {
                tokio::select! {
                    biased;
                    () = self.script(name, steps) => {}
                    () = self.prune_again_and_again(name, *pause) => {}
                }
                self.until_pruned(name).await;
            }
            Errand::Restart(rounds) => {
                self.ledger.will_be_deleted(name);
                for steps in rounds {
                    let before = self.start(name, SCRIPT, &Input::begin(steps)).await;
                    self.until_ended(name, before).await;
                    self.until_deleted(name, before).await;
                }
            }
            Errand::DeleteAndRunAgain(first, second) => {
                self.script(name, first).await;
                self.delete(name, false).await;
                self.script(name, second).await;
            }
            Errand::Cancel { steps, after } => {
                let before = self.start(name, SCRIPT, &Input::begin(steps)).await;
                tokio::time::sleep(*after).await;
                self.until_ok(name, "cancel", || self.client.cancel_instance(name, "enough")).await;
                self.until_ended(name, before).await;
            }
            Errand::DeleteRunning { steps, after } => {
                let before = self.start(name, SCRIPT, &Input::begin(steps)).await;
                self.until_begun(name, before).await;
                tokio::time::sleep(*after).await;
                self.delete(name, true).await;
            }
            Errand::Poison => {
                let before = self.start(name, UNKNOWN, "").await;
                self.until_ended(name, before).await;
            }
            Errand::Bank(business) => self.bank(business).await,
        }
        self.story.tell("client", Some(name), ERRAND_DONE);
    }

    async fn script(&self, name: &str, steps: &[Step]) {
        let before = self.start(name, SCRIPT, &Input::begin(steps)).await;
        let feeding = async {
            for number in 0..script::parcels(steps) {
                let parcel = || serde_json::to_string(&Parcel { number, nonce: nonce() }).expect("plain data");
                self.until_ok(name, "enqueue", || self.client.enqueue_event(name, QUEUE, parcel())).await;
            }
        };
        let events = script::events(steps);
        let raising = async {
            // An event that comes before somebody waits for it is lost: it is raised until the script has ended.
            while !events.is_empty() {
                for event in &events {
                    let raised = self.client.raise_event(name, event, format!("{}", nonce())).await;
                    self.story.tell("client", Some(name), format!("raises {event}: {raised:?}"));
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

    async fn bank(&self, business: &Business) {
        let accounts = || (0..business.accounts).map(|n| business.instance(n));
        let mut started = Vec::new();
        for account in accounts() {
            let before = self.start(&account, bank::ACCOUNT, &bank::Book::opening()).await;
            started.push((account, before));
        }
        for (number, transfer) in business.transfers.iter().enumerate() {
            let to = business.instance(transfer.to);
            let message = Message::Transfer { number, to, amount: transfer.amount };
            self.write(&business.instance(transfer.from), &message).await;
        }
        for n in 0..business.accounts {
            self.write(&business.instance(n), &business.closing(n)).await;
        }
        for (account, before) in started {
            self.until_ended(&account, before).await;
        }
    }

    async fn write(&self, account: &str, message: &Message) {
        let letter = || {
            let letter = Letter { nonce: nonce(), message: message.clone() };
            serde_json::to_string(&letter).expect("plain data")
        };
        self.until_ok(account, "enqueue", || self.client.enqueue_event(account, QUEUE, letter())).await;
    }

    /// Starts an instance; how many of this name were deleted before.
    async fn start(&self, name: &str, orchestration: &str, input: &str) -> usize {
        let before = self.ledger.deletions.times(name);
        self.until_ok(name, "start", || self.client.start_orchestration(name, orchestration, input)).await;
        before
    }

    async fn prune_again_and_again(&self, name: &str, pause: Duration) {
        loop {
            tokio::time::sleep(pause).await;
            let keep_last = [None, Some(0), Some(1), Some(2)][fastrand::usize(..4)];
            let pruned =
                self.client.prune_executions(name, PruneOptions { keep_last, ..PruneOptions::default() }).await;
            self.story.tell("client", Some(name), format!("prunes all but {keep_last:?}: {pruned:?}"));
        }
    }

    /// Prunes all executions but the last.
    async fn until_pruned(&self, name: &str) {
        let pruned = || async {
            let options = PruneOptions { keep_last: Some(1), ..PruneOptions::default() };
            match self.client.prune_executions(name, options).await {
                // Retention was faster.
                Err(_) if self.ledger.deletions.times(name) > 0 => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Ok(()),
            }
        };
        self.until_ok(name, "prune", pruned).await;
    }

    /// Waits until another one has deleted what has ended, or deletes it, at once or after a while.
    async fn until_deleted(&self, name: &str, before: usize) {
        let soon = Duration::from_millis(20);
        let mut patience = if fastrand::bool() { 0 } else { 500 };
        while self.ledger.deletions.times(name) == before {
            if patience == 0 {
                let deleted = self.client.delete_instance(name, false).await;
                self.story.tell("client", Some(name), format!("deletes what has ended: {deleted:?}"));
            }
            patience = u32::saturating_sub(patience, 1);
            tokio::time::sleep(soon).await;
        }
    }

    async fn delete(&self, name: &str, force: bool) {
        // What a request that was held for long has to say, it has said by then.
        tokio::time::sleep(Duration::from_secs(15)).await;
        self.ledger.will_be_deleted(name);
        if force {
            self.ledger.deletions.will_be_forced(name);
        }
        let deleted = || async {
            match self.client.delete_instance(name, force).await {
                // Somebody has been there before: this one, by a call whose answer did not come.
                Err(ClientError::InstanceNotFound { .. }) => Ok(()),
                Err(error) => Err(error),
                Ok(_) => Ok(()),
            }
        };
        self.until_ok(name, "delete", deleted).await;
    }

    /// Waits until an instance has begun. Retention may have deleted it by then: so many of this name were deleted before it.
    async fn until_begun(&self, name: &str, before: usize) {
        while self.ledger.deletions.times(name) == before
            && matches!(self.client.get_orchestration_status(name).await, Ok(OrchestrationStatus::NotFound) | Err(_))
        {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until an instance has ended. Retention may have deleted it by then: so many of this name were deleted before it.
    async fn until_ended(&self, name: &str, before: usize) {
        while self.ledger.deletions.times(name) == before {
            let status = self.client.get_orchestration_status(name).await;
            match status {
                Ok(OrchestrationStatus::Completed { .. } | OrchestrationStatus::Failed { .. }) => return,
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn until_ok<T, F>(&self, name: &str, what: &str, mut call: impl FnMut() -> F)
    where
        F: std::future::Future<Output = Result<T, ClientError>>,
    {
        loop {
            match call().await {
                Ok(_) => return self.story.tell("client", Some(name), format!("{what}: done")),
                Err(error) => self.story.tell("client", Some(name), format!("{what}: {error}")),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// A number that nobody else draws.
fn nonce() -> u64 {
    fastrand::u64(..1 << 50)
}

impl Fate {
    /// The status of an instance of this fate; none where it must be gone.
    pub fn status(&self) -> Option<&'static str> {
        match self {
            Self::Ended(Ending::Output(_), _) | Self::Balance(_) => Some("Completed"),
            Self::Ended(..) | Self::Cancelled | Self::Poisoned => Some("Failed"),
            Self::Gone => None,
        }
    }

    /// What is wrong with an instance of this fate whose status is this; nothing where all is well.
    pub fn differs(&self, instance: &str, status: &OrchestrationStatus) -> Option<Broken> {
        let as_it_must = match (self, status) {
            (
                Self::Ended(Ending::Output(wanted), about),
                OrchestrationStatus::Completed { output, custom_status, .. },
            ) => wanted == output && about == custom_status,
            (Self::Ended(Ending::Failure, about), OrchestrationStatus::Failed { details, custom_status, .. }) => {
                details.display_message().contains(script::TOLD_TO_FAIL) && about == custom_status
            }
            // What fails is the turn that can't be stored: what it had set before is not there either.
            (Self::Ended(Ending::TooLarge, _), OrchestrationStatus::Failed { details, .. }) => {
                !matches!(details, ErrorDetails::Poison { .. })
            }
            (Self::Balance(wanted), OrchestrationStatus::Completed { output, .. }) => *output == wanted.to_string(),
            (Self::Cancelled, OrchestrationStatus::Failed { details, .. }) => {
                matches!(details, ErrorDetails::Application { kind: duroxide::AppErrorKind::Cancelled { .. }, .. })
            }
            (Self::Poisoned, OrchestrationStatus::Failed { details, .. }) => {
                matches!(details, ErrorDetails::Poison { .. })
            }
            (Self::Gone, OrchestrationStatus::NotFound) => true,
            _ => false,
        };
        (!as_it_must).then(|| Broken {
            invariant: "every orchestration ends as it must",
            instance: instance.to_owned(),
            detail: format!("wanted {self:?}, found {status:?}"),
        })
    }
}
