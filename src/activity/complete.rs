//! The end of an activity, and its lock until then.

use super::{not_held, session, ActivityHandle, ActivityState};
use crate::{
    cosmos::{BatchOutcome, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    discovery,
    engine::Engine,
    model::{item, ActivityDocument, DocumentId, Lock, MessageDocument, Operation, Partition},
    queue::{
        activity::InlineNextActivity,
        turn::{InlineTurnClaim, Kind},
    },
    turn::{failure, load, read},
};
use azure_core::http::Etag;
use duroxide::{
    providers::{ProviderError, WorkItem},
    AppErrorKind, ErrorDetails, EventKind,
};
use std::{sync::Arc, time::Duration};
use tracing::warn;

fn held(engine: &Engine, token: &str, operation: &str) -> Result<Arc<ActivityHandle>, ProviderError> {
    let handle = engine.activities.get(token).map(|entry| entry.value().clone());
    handle.ok_or_else(|| not_held(operation, "Invalid lock token: it is not held here"))
}

/// Removes the activity and, with it, puts its completion into the orchestration's queue.
pub(crate) async fn complete(
    engine: &Arc<Engine>,
    token: &str,
    mut completion: Option<WorkItem>,
) -> Result<(), ProviderError> {
    const OPERATION: &str = "ack_work_item";
    if let Some(completion) = &mut completion {
        failure::shorten_item(completion);
    }
    let handle = held(engine, token, OPERATION)?;
    let mut state = handle.state.lock().await;
    if state.closed || state.until <= engine.now() {
        // It has run: this process must not give it back, uncounted, when it leaves.
        close(engine, &handle, &mut state);
        return Err(not_held(OPERATION, "its lock has expired or was given up"));
    }
    let message = match completion {
        Some(completion) => {
            let mut message = completion_message(engine, &handle, &completion)?;
            // The member whose turn scheduled it has the instance at hand.
            let by = discovery::completion_receiver(engine, state.document.known_by.as_deref());
            message.known_by = by.map(ToOwned::to_owned).or_else(|| engine.discovery.turn_holder_name());
            Some(message)
        }
        None => None,
    };
    let outcome = remove(engine, &handle, &mut state, message.as_ref()).await;
    match outcome {
        Ok(Removed::HandedOver) => {
            close(engine, &handle, &mut state);
            touch_session(engine, &state).await;
            Ok(())
        }
        Ok(Removed::Done(etag, next)) => {
            close(engine, &handle, &mut state);
            if let Some(message) = message {
                let by = discovery::completion_receiver(engine, state.document.known_by.as_deref());
                discovery::completion_written(engine, message, etag, by);
            }
            if let Some((next, etag)) = next {
                next.done(etag).await;
            }
            touch_session(engine, &state).await;
            Ok(())
        }
        Ok(Removed::NotOurs) => {
            close(engine, &handle, &mut state);
            Err(not_held(OPERATION, "it was cancelled, or its lock was taken over"))
        }
        Err(error) => Err(error.into_provider_error(OPERATION)),
    }
}

/// How the removal of an activity ended.
enum Removed {
    /// It is gone; the ETag of its completion where the service said so.
    /// And the next activity, which was claimed with it, with its ETag where that is known.
    Done(Option<Etag>, Option<(Box<InlineNextActivity>, Option<Etag>)>),
    /// It is gone, and whoever waited for its orchestration's turn has it.
    HandedOver,
    /// It was cancelled, or somebody else has it.
    NotOurs,
}

fn close(engine: &Engine, handle: &ActivityHandle, state: &mut ActivityState) {
    state.close();
    engine.activities.remove(&handle.token);
}

fn completion_message(
    engine: &Engine,
    handle: &ActivityHandle,
    completion: &WorkItem,
) -> Result<MessageDocument, ProviderError> {
    let refuse = |why: String| ProviderError::permanent("ack_work_item", why);
    let instance = item::target(completion)
        .ok_or_else(|| refuse(format!("{} can't complete an activity", item::kind(completion))))?;
    let partition = Partition::instance(instance).map_err(|e| refuse(e.to_string()))?;
    let now = engine.now();
    let key = MessageDocument::completion_key(&handle.token);
    let due = item::visible_at(completion, now);
    let message = MessageDocument::new(partition, &key, completion, engine.sequencer.next(), now, due)
        .map_err(|e| refuse(format!("the completion can't be written as JSON: {e}")))?;
    let Some(bytes) = message.oversize() else { return Ok(message) };
    let (kind, limit) = (item::kind(completion), MessageDocument::MAX_BYTES);
    let Some(failure) = too_large(completion, bytes, limit) else {
        return Err(refuse(format!("{kind} for {instance:?} has {bytes} bytes, but the limit is {limit}")));
    };
    warn!(instance_id = instance, bytes, limit, "an activity's result is too large: the activity has failed");
    completion_message(engine, handle, &failure)
}

/// The failure of an activity whose result can't be stored. A refusal would make the runtime run the activity again, with the
/// same result, until it is poisoned.
fn too_large(completion: &WorkItem, bytes: usize, limit: usize) -> Option<WorkItem> {
    let WorkItem::ActivityCompleted { instance, execution_id, id, .. } = completion else { return None };
    let message =
        format!("the result of the activity has {bytes} bytes as it is stored, but the limit is {limit} bytes");
    let details = ErrorDetails::Application { kind: AppErrorKind::ActivityFailed, message, retryable: false };
    Some(WorkItem::ActivityFailed { instance: instance.clone(), execution_id: *execution_id, id: *id, details })
}

/// One batch that removes the activity, its payload, and creates the completion.
async fn remove(
    engine: &Arc<Engine>,
    handle: &ActivityHandle,
    state: &mut ActivityState,
    message: Option<&MessageDocument>,
) -> Result<Removed, StoreError> {
    let here = message.filter(|m| m.instance_id == handle.partition);
    let mut with_payload = state.document.has_payload_document();
    let mut attached = AttachedClaim::new(engine, handle, state, here);
    let (etag, next) = loop {
        let deadline = engine.deadline_at(state.until);
        let mut operations = vec![Operation::delete(state.document.id.clone(), Some(&state.etag))];
        if let Some(message) = here.filter(|_| !attached.has_inlined()) {
            operations.push(Operation::create(message)?);
        }
        if with_payload {
            operations.push(Operation::delete(ActivityDocument::payload_id(&state.document.id), None));
        }
        let plain = operations.len();
        operations.extend(attached.operation()?);
        let sent = engine.store.batch(&handle.partition, &operations, attached.deadline(deadline)).await;
        if sent.is_err() && !attached.is_nothing() && !deadline.passed() {
            // The plain way finds out what has happened; what was claimed, if it was, is given back.
            attached = AttachedClaim::Nothing;
            continue;
        }
        match sent? {
            BatchOutcome::Committed(committed) => {
                let (etag, claimed) = (committed.etag(1).cloned(), committed.etag(plain).cloned());
                match attached {
                    AttachedClaim::Nothing => break (etag, None),
                    AttachedClaim::InlineNextActivity(next) => break (etag, Some((next, claimed))),
                    AttachedClaim::Turn(offer) => {
                        let created = !offer.has_inlined();
                        offer.done(etag.filter(|_| created), claimed);
                        return Ok(Removed::HandedOver);
                    }
                }
            }
            BatchOutcome::RolledBack(back) if back.index == plain && matches!(back.status, 404 | 412) => {
                attached.refused();
                attached = AttachedClaim::Nothing;
            }
            BatchOutcome::RolledBack(back) if back.index == plain - 1 && with_payload && back.status == 404 => {
                with_payload = false;
            }
            BatchOutcome::RolledBack(_) => match verify(engine, handle, state, here, deadline).await? {
                CompletionCheck::Done => match attached {
                    AttachedClaim::Nothing => break (None, None),
                    AttachedClaim::InlineNextActivity(next) => break (None, Some((next, None))),
                    AttachedClaim::Turn(offer) => {
                        offer.look();
                        return Ok(Removed::HandedOver);
                    }
                },
                CompletionCheck::StillOurs => {}
                CompletionCheck::Lost => return Ok(Removed::NotOurs),
            },
        }
    };
    // A completion for another instance can't go in the same batch; its queue gets it right after.
    if let Some(message) = message.filter(|m| m.instance_id != handle.partition) {
        let deadline = engine.deadline();
        engine.store.create(&message.instance_id, &message.id, message, deadline).await?;
        return Ok(Removed::Done(None, next));
    }
    Ok(Removed::Done(etag.filter(|_| here.is_some()), next))
}

/// What is claimed by the batch that ends an activity.
enum AttachedClaim {
    Nothing,
    /// The turn of its orchestration.
    Turn(Box<InlineTurnClaim>),
    /// The next activity for the same worker.
    InlineNextActivity(Box<InlineNextActivity>),
}

impl AttachedClaim {
    fn new(
        engine: &Arc<Engine>,
        handle: &ActivityHandle,
        state: &ActivityState,
        message: Option<&MessageDocument>,
    ) -> Self {
        // Who has the instance at hand is told.
        let is_ours = discovery::completion_receiver(engine, state.document.known_by.as_deref()).is_none();
        let turn = message.filter(|_| is_ours).and_then(|message| InlineTurnClaim::new(engine, message, Kind::End));
        match turn {
            Some(turn) => Self::Turn(Box::new(turn)),
            None => InlineNextActivity::new(engine, handle)
                .map_or(Self::Nothing, |next| Self::InlineNextActivity(Box::new(next))),
        }
    }

    /// Whether the completion goes with the claim.
    fn has_inlined(&self) -> bool {
        matches!(self, Self::Turn(offer) if offer.has_inlined())
    }

    fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    fn operation(&mut self) -> Result<Option<Operation>, StoreError> {
        match self {
            Self::Nothing => Ok(None),
            Self::Turn(offer) => offer.operation().map(Some),
            Self::InlineNextActivity(next) => next.operation().map(Some),
        }
    }

    fn deadline(&self, deadline: Deadline) -> Deadline {
        match self {
            Self::Nothing => deadline,
            Self::Turn(offer) => offer.deadline(deadline),
            Self::InlineNextActivity(next) => next.deadline(deadline),
        }
    }

    fn refused(self) {
        match self {
            Self::Nothing => {}
            Self::Turn(offer) => offer.refused(),
            Self::InlineNextActivity(next) => next.refused(),
        }
    }
}

enum CompletionCheck {
    Done,
    StillOurs,
    Lost,
}

/// Reads whether the batch happened: the completion is there, or the history has it already. An inlined one may be written out, and
/// either may be consumed, between two looks, so they are looked for in this order.
async fn verify(
    engine: &Arc<Engine>,
    handle: &ActivityHandle,
    state: &mut ActivityState,
    message: Option<&MessageDocument>,
    deadline: Deadline,
) -> Result<CompletionCheck, StoreError> {
    if let Some(found) = look(engine, &handle.partition, &state.document.id, deadline).await? {
        if !found.document.held_by(&handle.token) {
            return Ok(CompletionCheck::Lost);
        }
        state.document = found.document;
        state.etag = found.etag;
        return Ok(CompletionCheck::StillOurs);
    }
    let Some(message) = message else {
        // Removed without a completion: whoever did it, it is as was asked.
        return Ok(CompletionCheck::Done);
    };
    let instance = engine.read_latest(&handle.partition, deadline).await?;
    if instance.is_some_and(|instance| instance.document.has_inlined(&message.id)) {
        return Ok(CompletionCheck::Done);
    }
    let freshness = Freshness::Authoritative;
    let found = engine.store.read::<serde_json::Value>(&handle.partition, &message.id, freshness, deadline).await?;
    if found.is_some() || consumed(engine, handle, state, deadline).await? {
        return Ok(CompletionCheck::Done);
    }
    Ok(CompletionCheck::Lost)
}

/// Whether the orchestration's history has this activity's completion.
async fn consumed(
    engine: &Arc<Engine>,
    handle: &ActivityHandle,
    state: &ActivityState,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Some((execution, activity)) = state.identity else { return Ok(false) };
    let documents = read::history(engine, &handle.partition, execution, Freshness::Authoritative, deadline).await?;
    let Ok((events, _)) = load::events(documents) else { return Ok(false) };
    Ok(events.iter().any(|event| {
        event.source_event_id == Some(activity)
            && matches!(event.kind, EventKind::ActivityCompleted { .. } | EventKind::ActivityFailed { .. })
    }))
}

async fn look(
    engine: &Engine,
    partition: &Partition,
    id: &DocumentId,
    deadline: Deadline,
) -> Result<Option<Versioned<ActivityDocument>>, StoreError> {
    engine.store.read(partition, id, Freshness::Authoritative, deadline).await
}

/// Extends the lock of an activity from now. Trouble is ridden out: any error would cancel the activity.
pub(crate) async fn renew(engine: &Arc<Engine>, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
    const OPERATION: &str = "renew_work_item_lock";
    let handle = held(engine, token, OPERATION)?;
    let mut state = handle.state.lock().await;
    if state.closed || state.until <= engine.now() {
        // The runtime cancels the activity now and removes it without a completion: refused, also if the clock is set back.
        state.close();
        return Err(not_held(OPERATION, "its lock has expired"));
    }
    let until = engine.clock.after(extend_for);
    let change = |document: &mut ActivityDocument| {
        document.lock = Some(Lock { token: token.to_owned(), until });
        document.due = until;
    };
    let deadline = engine.deadline_at(state.until);
    match rewrite(engine, &handle, &mut state, change, deadline).await {
        Ok(true) => {
            state.until = until;
            touch_session(engine, &state).await;
            Ok(())
        }
        Ok(false) => {
            state.close();
            Err(not_held(OPERATION, "it was cancelled, or its lock was taken over"))
        }
        Err(error) => {
            // The runtime cancels the activity now and removes it without a completion: that must not happen.
            state.close();
            Err(error.into_provider_error(OPERATION))
        }
    }
}

/// Makes an activity available again.
pub(crate) async fn abandon(
    engine: &Arc<Engine>,
    token: &str,
    delay: Option<Duration>,
    ignore_attempt: bool,
) -> Result<(), ProviderError> {
    const OPERATION: &str = "abandon_work_item";
    let handle = held(engine, token, OPERATION)?;
    let mut state = handle.state.lock().await;
    let due = engine.clock.after(delay.unwrap_or_default());
    let change = |document: &mut ActivityDocument| {
        document.lock = None;
        document.due = due;
        if ignore_attempt {
            document.attempts = document.attempts.saturating_sub(1);
        }
    };
    match rewrite(engine, &handle, &mut state, change, engine.deadline()).await {
        Ok(true) => {
            close(engine, &handle, &mut state);
            let mut document = state.document.clone();
            document.etag = Some(state.etag.clone());
            engine.discovery.offer_activity(document);
            Ok(())
        }
        Ok(false) => {
            close(engine, &handle, &mut state);
            Err(not_held(OPERATION, "it was cancelled, or its lock was taken over"))
        }
        Err(error) => Err(error.into_provider_error(OPERATION)),
    }
}

/// Changes the activity's document as long as our token is in it; `false` where it is not.
async fn rewrite(
    engine: &Engine,
    handle: &ActivityHandle,
    state: &mut ActivityState,
    change: impl Fn(&mut ActivityDocument),
    deadline: Deadline,
) -> Result<bool, StoreError> {
    loop {
        let mut next = state.document.clone();
        change(&mut next);
        let id = next.id.clone();
        let written = engine.store.replace(&handle.partition, &id, &next, Some(&state.etag), deadline).await?;
        if let WriteOutcome::Done(etag) = written {
            state.document = next;
            state.etag = etag;
            return Ok(true);
        }
        let Some(found) = look(engine, &handle.partition, &id, deadline).await? else { return Ok(false) };
        let same = found.document.lock == next.lock && found.document.due == next.due;
        if !same && !found.document.held_by(&handle.token) {
            return Ok(false);
        }
        state.document = found.document;
        state.etag = found.etag;
        if same {
            // The change was made with its answer lost.
            return Ok(true);
        }
    }
}

/// The session of an activity that was renewed or completed is in use.
async fn touch_session(engine: &Engine, state: &ActivityState) {
    let Some(session_id) = &state.document.session_id else { return };
    if let Err(error) = session::touch(engine, session_id, engine.deadline()).await {
        warn!(session_id, %error, "the session's last activity could not be written");
    }
}
