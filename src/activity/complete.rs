//! Completes, releases and renews an activity.

use super::{not_held, session, ActivityHandle, ActivityState};
use crate::{
    cosmos::{BatchOutcome, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    discovery,
    engine::Engine,
    model::{item, ActivityDocument, DocumentId, Lock, MessageDocument, Operation, Partition},
    queue::{
        activity::InlineNextActivity,
        turn::{InlineTurnClaim, MessageKind},
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

/// The activity that this process holds under `token`.
fn held(engine: &Engine, token: &str, operation: &str) -> Result<Arc<ActivityHandle>, ProviderError> {
    let handle = engine.activities.get(token).map(|entry| entry.value().clone());
    handle.ok_or_else(|| not_held(operation, "Invalid lock token: it is not held here"))
}

/// Deletes the activity and enqueues its completion to the orchestration.
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
        // The activity has run. A shutdown of this process must not release it without counting the attempt.
        close(engine, &handle, &mut state);
        return Err(not_held(OPERATION, "its lock has expired, or an earlier renewal failed"));
    }
    let message = match completion {
        Some(completion) => {
            let mut message = completion_message(engine, &handle, &completion)?;
            // The worker whose turn scheduled the activity probably has the instance in its cache.
            let by = discovery::completion_receiver(engine, state.document.known_by.as_deref());
            message.known_by = by.map(ToOwned::to_owned).or_else(|| engine.discovery.turn_holder_name());
            Some(message)
        }
        None => None,
    };
    let outcome = remove(engine, &handle, &mut state, message.as_ref()).await;
    match outcome {
        Ok(Removed::TurnClaimed) => {
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

/// How the deletion of an activity ended.
enum Removed {
    /// The activity is deleted. The first ETag is that of its completion, if Cosmos DB returned it. The second part is
    /// the next activity that the same batch claimed, with its ETag if that is known.
    Done(Option<Etag>, Option<(Box<InlineNextActivity>, Option<Etag>)>),
    /// The activity is deleted, and the same batch claimed the orchestration's turn for a waiting dispatcher.
    TurnClaimed,
    /// The activity was cancelled, or another worker holds it.
    NotOurs,
}

/// Ends the use of a token.
fn close(engine: &Engine, handle: &ActivityHandle, state: &mut ActivityState) {
    state.close();
    engine.activities.remove(&handle.token);
}

/// The message that reports the completion. A result that is too large becomes a failure of the activity.
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
    warn!(instance_id = instance, bytes, limit, "an activity's result is too large, so the activity fails");
    completion_message(engine, handle, &failure)
}

/// The failure of an activity whose result cannot be stored. If the provider returned an error instead, the runtime
/// would run the activity again, with the same result, until it is poisoned.
fn too_large(completion: &WorkItem, bytes: usize, limit: usize) -> Option<WorkItem> {
    let WorkItem::ActivityCompleted { instance, execution_id, id, .. } = completion else { return None };
    let message =
        format!("the result of the activity has {bytes} bytes as it is stored, but the limit is {limit} bytes");
    let details = ErrorDetails::Application { kind: AppErrorKind::ActivityFailed, message, retryable: false };
    Some(WorkItem::ActivityFailed { instance: instance.clone(), execution_id: *execution_id, id: *id, details })
}

/// Deletes the activity and its payload, and creates the completion.
async fn remove(
    engine: &Arc<Engine>,
    handle: &ActivityHandle,
    state: &mut ActivityState,
    message: Option<&MessageDocument>,
) -> Result<Removed, StoreError> {
    let local = message.filter(|m| m.instance_id == handle.partition);
    let (etag, next) = match remove_in_partition(engine, handle, state, local).await? {
        Removed::Done(etag, next) => (etag, next),
        other => return Ok(other),
    };
    // A completion to another instance cannot be part of the same batch, so it is enqueued right afterwards.
    if let Some(message) = message.filter(|m| m.instance_id != handle.partition) {
        let deadline = engine.deadline();
        engine.store.create(&message.instance_id, &message.id, message, deadline).await?;
        return Ok(Removed::Done(None, next));
    }
    Ok(Removed::Done(etag.filter(|_| local.is_some()), next))
}

/// Sends one batch that deletes the activity and creates the completion, until its outcome is known. The batch also
/// makes an inline claim, if one is possible.
async fn remove_in_partition(
    engine: &Arc<Engine>,
    handle: &ActivityHandle,
    state: &mut ActivityState,
    message: Option<&MessageDocument>,
) -> Result<Removed, StoreError> {
    let mut with_payload = state.document.has_payload_document();
    let mut attached = AttachedClaim::new(engine, handle, state, message);
    loop {
        let deadline = engine.deadline_at(state.until);
        let mut operations = removal(state, message.filter(|_| !attached.has_inlined()), with_payload)?;
        let claim_index = operations.len();
        operations.extend(attached.operation()?);
        let sent = engine.store.batch(&handle.partition, &operations, attached.deadline(deadline)).await;
        if sent.is_err() && !attached.is_nothing() && !deadline.passed() {
            // The next batch, without a claim, finds out the outcome. Dropping the claim releases it if it was made.
            attached = AttachedClaim::Nothing;
            continue;
        }
        match sent? {
            BatchOutcome::Committed(committed) => {
                let (etag, claim_etag) = (committed.etag(1).cloned(), committed.etag(claim_index).cloned());
                return Ok(attached.committed(etag, claim_etag));
            }
            BatchOutcome::RolledBack(back) if back.index == claim_index && matches!(back.status, 404 | 412) => {
                attached.refused();
                attached = AttachedClaim::Nothing;
            }
            BatchOutcome::RolledBack(back) if back.index == claim_index - 1 && with_payload && back.status == 404 => {
                with_payload = false;
            }
            BatchOutcome::RolledBack(_) => match verify(engine, handle, state, message, deadline).await? {
                CompletionCheck::Done => return Ok(attached.committed_without_answer()),
                CompletionCheck::StillOurs => {}
                CompletionCheck::Lost => return Ok(Removed::NotOurs),
            },
        }
    }
}

/// The operations that delete the activity and its payload and create the completion. The payload comes last.
fn removal(
    state: &ActivityState,
    message: Option<&MessageDocument>,
    with_payload: bool,
) -> Result<Vec<Operation>, StoreError> {
    let mut operations = vec![Operation::delete(state.document.id.clone(), Some(&state.etag))];
    if let Some(message) = message {
        operations.push(Operation::create(message)?);
    }
    if with_payload {
        operations.push(Operation::delete(ActivityDocument::payload_id(&state.document.id), None));
    }
    Ok(operations)
}

/// The inline claim in the batch that completes an activity.
enum AttachedClaim {
    Nothing,
    /// The turn of the activity's orchestration.
    Turn(Box<InlineTurnClaim>),
    /// The next activity for the same worker.
    NextActivity(Box<InlineNextActivity>),
}

impl AttachedClaim {
    fn new(
        engine: &Arc<Engine>,
        handle: &ActivityHandle,
        state: &ActivityState,
        message: Option<&MessageDocument>,
    ) -> Self {
        // If another worker probably has the instance in its cache, that worker gets a wake-up instead.
        let is_ours = discovery::completion_receiver(engine, state.document.known_by.as_deref()).is_none();
        let turn = message
            .filter(|_| is_ours)
            .and_then(|message| InlineTurnClaim::new(engine, message, MessageKind::Completion));
        match turn {
            Some(turn) => Self::Turn(Box::new(turn)),
            None => {
                InlineNextActivity::new(engine, handle).map_or(Self::Nothing, |next| Self::NextActivity(Box::new(next)))
            }
        }
    }

    /// The batch succeeded and returned these ETags of the completion and of the claimed document.
    fn committed(self, etag: Option<Etag>, claim_etag: Option<Etag>) -> Removed {
        match self {
            Self::Nothing => Removed::Done(etag, None),
            Self::NextActivity(next) => Removed::Done(etag, Some((next, claim_etag))),
            Self::Turn(claim) => {
                let created = !claim.has_inlined();
                claim.done(etag.filter(|_| created), claim_etag);
                Removed::TurnClaimed
            }
        }
    }

    /// The batch succeeded, but its answer was lost.
    fn committed_without_answer(self) -> Removed {
        match self {
            Self::Nothing => Removed::Done(None, None),
            Self::NextActivity(next) => Removed::Done(None, Some((next, None))),
            Self::Turn(claim) => {
                claim.verify_later();
                Removed::TurnClaimed
            }
        }
    }

    /// Whether the claim inlines the completion into the instance document.
    fn has_inlined(&self) -> bool {
        matches!(self, Self::Turn(claim) if claim.has_inlined())
    }

    fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    fn operation(&mut self) -> Result<Option<Operation>, StoreError> {
        match self {
            Self::Nothing => Ok(None),
            Self::Turn(claim) => claim.operation().map(Some),
            Self::NextActivity(next) => next.operation().map(Some),
        }
    }

    fn deadline(&self, deadline: Deadline) -> Deadline {
        match self {
            Self::Nothing => deadline,
            Self::Turn(claim) => claim.deadline(deadline),
            Self::NextActivity(next) => next.deadline(deadline),
        }
    }

    /// The batch failed because of the claim.
    fn refused(self) {
        match self {
            Self::Nothing => {}
            Self::Turn(claim) => claim.refused(),
            Self::NextActivity(next) => next.refused(),
        }
    }
}

/// The outcome of a completion, as reads show it.
enum CompletionCheck {
    Done,
    StillOurs,
    Lost,
}

/// Reads whether the batch happened: the completion is inlined, it is in the queue, or the history has it. Between two
/// reads an inlined message may become a document, and a turn may consume either. So the reads are in this order.
async fn verify(
    engine: &Arc<Engine>,
    handle: &ActivityHandle,
    state: &mut ActivityState,
    message: Option<&MessageDocument>,
    deadline: Deadline,
) -> Result<CompletionCheck, StoreError> {
    if let Some(found) = read_activity(engine, &handle.partition, &state.document.id, deadline).await? {
        if !found.document.held_by(&handle.token) {
            return Ok(CompletionCheck::Lost);
        }
        state.document = found.document;
        state.etag = found.etag;
        return Ok(CompletionCheck::StillOurs);
    }
    let Some(message) = message else {
        // The activity was to be deleted without a completion, and it is deleted.
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

/// Whether the orchestration's history has the completion of this activity.
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

/// Reads the activity document where writes go.
async fn read_activity(
    engine: &Engine,
    partition: &Partition,
    id: &DocumentId,
    deadline: Deadline,
) -> Result<Option<Versioned<ActivityDocument>>, StoreError> {
    engine.store.read(partition, id, Freshness::Authoritative, deadline).await
}

/// Extends the lock of an activity from now. It retries as long as the lock lasts, because any error makes the runtime
/// cancel the activity.
pub(crate) async fn renew(engine: &Arc<Engine>, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
    const OPERATION: &str = "renew_work_item_lock";
    let handle = held(engine, token, OPERATION)?;
    let mut state = handle.state.lock().await;
    if state.closed || state.until <= engine.now() {
        // The runtime now cancels the activity and then deletes it without a completion. The provider refuses that ack,
        // even if the clock moves back.
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
            // The runtime now cancels the activity and then deletes it without a completion. The provider must refuse
            // that ack.
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

/// Changes the activity document while our token holds its lock. Returns `false` if it does not.
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
        let Some(found) = read_activity(engine, &handle.partition, &id, deadline).await? else { return Ok(false) };
        let same = found.document.lock == next.lock && found.document.due == next.due;
        if !same && !found.document.held_by(&handle.token) {
            return Ok(false);
        }
        state.document = found.document;
        state.etag = found.etag;
        if same {
            // The write happened, and its answer was lost.
            return Ok(true);
        }
    }
}

/// Records that the session of a renewed or completed activity is in use.
async fn touch_session(engine: &Engine, state: &ActivityState) {
    let Some(session_id) = &state.document.session_id else { return };
    if let Err(error) = session::touch(engine, session_id, engine.deadline()).await {
        warn!(session_id, %error, "could not record the last activity of a session");
    }
}
