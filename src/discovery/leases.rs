//! The slots that a process covers. They decide only where it polls first. Work in other slots is found by the workers
//! that cover them, by a wake-up, or by the recovery poll in which every worker takes part. So no answer of a
//! [`LeaseProvider`] can lose or duplicate work.

use crate::model::{EqualShares, LeaseProvider, MemberPosition, SlotRange};
use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, PoisonError,
    },
    time::Duration,
};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::warn;

/// How long a [`LeaseProvider`] may think.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often a [`LeaseProvider`] that fails is reported.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// Asks the [`LeaseProvider`] of an application, whose code may panic or block.
pub(super) struct Asker {
    patience: Duration,
    /// A call has not returned: nobody else is sent after it.
    busy: Arc<AtomicBool>,
    state: Mutex<LeaseState>,
}

#[derive(Default)]
struct LeaseState {
    last: Option<Shares>,
    reported: Option<Instant>,
}

/// The slots of turns and of activities that a process looks after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    pub(super) turns: SlotRange,
    pub(super) work: SlotRange,
}

impl Default for Asker {
    fn default() -> Self {
        Self { patience: PATIENCE, busy: Arc::default(), state: Mutex::default() }
    }
}

impl Asker {
    /// The slots at these places among those that run turns and activities. Without a provider they are equal shares.
    pub(super) async fn shares(
        &self,
        leases: Option<&Arc<dyn LeaseProvider>>,
        turns: MemberPosition,
        work: MemberPosition,
    ) -> Shares {
        let ask = move |leases: &dyn LeaseProvider| Shares { turns: leases.slots(turns), work: leases.slots(work) };
        let Some(leases) = leases else { return ask(&EqualShares) };
        let answer = if self.busy.swap(true, Ordering::SeqCst) {
            Err("an earlier call has not returned")
        } else {
            let (busy, leases) = (Busy(self.busy.clone()), leases.clone());
            answer_apart(busy, move || ask(leases.as_ref()), self.patience).await
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Ok(shares) => *state.last.insert(shares),
            Err(why) => {
                let now = Instant::now();
                if state.reported.is_none_or(|at| now.duration_since(at) >= REPORT_EVERY) {
                    state.reported = Some(now);
                    warn!(why, "the LeaseProvider does not answer, using its last answer or equal shares");
                }
                state.last.unwrap_or_else(|| ask(&EqualShares))
            }
        }
    }
}

/// A call of the application's code, until it returns or panics.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Calls the application's code on a thread of its own. A blocking task of the runtime would keep the runtime from shutting down.
async fn answer_apart(
    busy: Busy,
    ask: impl FnOnce() -> Shares + Send + 'static,
    patience: Duration,
) -> Result<Shares, &'static str> {
    let (sender, answer) = oneshot::channel();
    let call = move || {
        // The call has ended before its caller hears of it, also by a panic.
        let answer = {
            let _busy = busy;
            ask()
        };
        // The caller may have given up waiting.
        let _ = sender.send(answer);
    };
    std::thread::Builder::new()
        .name("LeaseProvider".to_owned())
        .spawn(call)
        .map_err(|_| "there is no thread for it")?;
    match tokio::time::timeout(patience, answer).await {
        Ok(answer) => answer.map_err(|_| "it panicked"),
        Err(_) => Err("it takes too long"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Does what it is sent: answers with these slots, or panics where there are none. It waits for that.
    #[derive(Debug)]
    struct Scripted(Mutex<mpsc::Receiver<Option<SlotRange>>>);

    impl LeaseProvider for Scripted {
        fn slots(&self, _place: MemberPosition) -> SlotRange {
            let next = self.0.lock().unwrap_or_else(PoisonError::into_inner).recv();
            next.expect("a script").expect("a panic that the test asked for")
        }
    }

    #[tokio::test]
    async fn a_provider_that_panics_or_blocks_leaves_the_last_answer_or_equal_shares() {
        let (script, receiver) = mpsc::channel();
        let leases: Arc<dyn LeaseProvider> = Arc::new(Scripted(receiver.into()));
        let (turns, work) = (MemberPosition::new(1, 2), MemberPosition::new(0, 1));
        // A call that returns is waited for, however slow this machine is.
        const LONG: Duration = Duration::from_secs(3_600);
        let mut asker = Asker { patience: LONG, ..Asker::default() };
        let equal = Shares { turns: SlotRange::part(1, 2), work: SlotRange::ALL };
        assert_eq!(asker.shares(None, turns, work).await, equal);

        script.send(None).unwrap();
        assert_eq!(asker.shares(Some(&leases), turns, work).await, equal, "it panicked before its first answer");
        let own = Shares { turns: SlotRange::new(3, 4), work: SlotRange::new(5, 6) };
        script.send(Some(own.turns)).unwrap();
        script.send(Some(own.work)).unwrap();
        assert_eq!(asker.shares(Some(&leases), turns, work).await, own);
        script.send(None).unwrap();
        assert_eq!(asker.shares(Some(&leases), turns, work).await, own, "it panicked");

        asker.patience = Duration::ZERO;
        assert_eq!(asker.shares(Some(&leases), turns, work).await, own, "it blocks");
        assert!(asker.busy.load(Ordering::SeqCst));
        asker.patience = LONG;
        assert_eq!(asker.shares(Some(&leases), turns, work).await, own, "it still blocks, and no second call was made");
        script.send(Some(own.work)).unwrap();
        script.send(Some(own.turns)).unwrap();
        while asker.busy.load(Ordering::SeqCst) {
            tokio::task::yield_now().await;
        }
        script.send(Some(own.work)).unwrap();
        script.send(Some(own.turns)).unwrap();
        let swapped = Shares { turns: own.work, work: own.turns };
        assert_eq!(asker.shares(Some(&leases), turns, work).await, swapped, "it answers again");
    }
}
