//! Every query that we send, each with the index that it relies on, parameters always bound.
//!
//! A test walks [`ALL`] and fails where a path that a query filters or orders by is not in the indexing policy.

use super::{error::StoreError, manner::Manner};
use azure_data_cosmos::Query;
use serde::Serialize;
use serde_json::Value;
use std::num::NonZeroU32;

/// The text of a query and the name under which it appears in logs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryText {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

/// A query with its parameters bound.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    text: QueryText,
    parameters: Vec<(&'static str, Value)>,
    page_size: Option<NonZeroU32>,
    manner: Manner,
}

impl QueryText {
    /// The query without parameters yet.
    pub(crate) fn statement(self) -> Statement {
        Statement { text: self, parameters: Vec::new(), page_size: None, manner: Manner::default() }
    }
}

impl Statement {
    /// Binds a parameter; `name` begins with `@`.
    pub(crate) fn bind(mut self, name: &'static str, value: impl Serialize) -> Self {
        debug_assert!(self.text.text.contains(name), "{} has no parameter {name}", self.text.name);
        // Only strings, numbers and lists of them are bound, and those always serialise.
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        self.parameters.push((name, value));
        self
    }

    /// At most this many rows in each physical partition's page: `TOP` alone never reaches the partitions. The service
    /// decides otherwise.
    pub(crate) fn in_pages_of(mut self, rows: NonZeroU32) -> Self {
        self.page_size = Some(rows);
        self
    }

    /// Sees everything that was committed in the region that answers, not just what this process knows of: where others tell
    /// that there is something, and a replica that lags would swallow it.
    pub(crate) fn latest_committed(mut self) -> Self {
        self.manner = self.manner.latest_committed();
        self
    }

    /// Where throughput is short, everything else goes first.
    pub(crate) fn in_background(mut self) -> Self {
        self.manner = self.manner.in_background();
        self
    }

    pub(super) fn manner(&self) -> Manner {
        self.manner
    }

    pub(super) fn page_size(&self) -> Option<NonZeroU32> {
        self.page_size
    }

    pub(super) fn name(&self) -> &'static str {
        self.text.name
    }

    pub(super) fn into_query(self) -> Result<Query, StoreError> {
        let mut query = Query::from(self.text.text);
        for (name, value) in self.parameters {
            query = query.with_parameter(name, value).map_err(|e| StoreError::Malformed {
                detail: format!("the parameter {name} of {} can't be written: {e}", self.text.name),
            })?;
        }
        Ok(query)
    }
}

/// Cuts a list of names, each of which may be long, into parts of at most `most` that each fit the parameters of one query.
pub(crate) fn names_in_questions(names: &[String], most: usize) -> Vec<&[String]> {
    const BYTES: usize = 100_000;
    let mut parts = Vec::new();
    let (mut from, mut bytes) = (0, 0);
    for (at, name) in names.iter().enumerate() {
        if at > from && (at - from == most || bytes + name.len() > BYTES) {
            parts.push(&names[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += name.len();
    }
    if from < names.len() {
        parts.push(&names[from..]);
    }
    parts
}

/// What a turn needs, in one question: visible messages, and parked ones where `@parked` says how to tell them, the current
/// execution's history, values. Index: `type`, `due`, `execution`.
pub(crate) const TURN: QueryText = QueryText {
    name: "turn",
    text: "SELECT * FROM c WHERE (c.type = 'message' AND (c.due <= @now OR c.due = @parked)) OR c.type = 'kv' \
           OR (c.type = 'history' AND c.execution = @execution)",
};

/// The oldest visible messages of an instance whose history is known, and parked ones where `@parked` says how to tell them:
/// one more than go into a turn tells that there are more. Index: `type`, `due`, `seq`.
pub(crate) const VISIBLE_MESSAGES: QueryText = QueryText {
    name: "visible_messages",
    text: "SELECT TOP 501 * FROM c WHERE c.type = 'message' AND (c.due <= @now OR c.due = @parked) ORDER BY c.seq",
};

/// The visible starts of an instance that has more messages than go into a turn. Index: `type`, `due`, `starts`.
pub(crate) const VISIBLE_STARTS: QueryText = QueryText {
    name: "visible_starts",
    text: "SELECT * FROM c WHERE c.type = 'message' AND c.due <= @now AND c.starts = true",
};

/// Whether an instance has a start in its queue, visible or not, and which instance has sent it. Index: `type`, `starts`.
pub(crate) const QUEUED_STARTS: QueryText = QueryText {
    name: "queued_starts",
    text: "SELECT TOP 1 c.id, c.born FROM c WHERE c.type = 'message' AND c.starts = true",
};

/// What the turns of an instance have consumed from outside, in all executions. Index: `type`.
pub(crate) const CONSUMED: QueryText =
    QueryText { name: "consumed", text: "SELECT VALUE c.consumed FROM c WHERE c.type = 'history'" };

/// The history of one execution. Index: `type`, `execution`.
pub(crate) const HISTORY: QueryText =
    QueryText { name: "history", text: "SELECT * FROM c WHERE c.type = 'history' AND c.execution = @execution" };

/// Which turns have written history documents. Index: `type`.
pub(crate) const HISTORY_ROWS: QueryText =
    QueryText { name: "history_rows", text: "SELECT c.id, c.execution FROM c WHERE c.type = 'history'" };

/// Whether there is any history. Index: `type`.
pub(crate) const ANY_HISTORY: QueryText =
    QueryText { name: "any_history", text: "SELECT TOP 1 c.id FROM c WHERE c.type = 'history'" };

/// Every document of a partition, whole, but those that may be many and large. Index: `type`.
pub(crate) const SMALL_DOCUMENTS: QueryText = QueryText {
    name: "small_documents",
    text: "SELECT * FROM c WHERE NOT IS_DEFINED(c.type) OR NOT (c.type IN ('history', 'payload', 'execution', 'delivered'))",
};

/// Inputs and past executions, without what may be large. Index: `type`.
pub(crate) const LARGE_DOCUMENTS: QueryText = QueryText {
    name: "large_documents",
    text: "SELECT c.id, c.instanceId, c._etag, c.type, c.execution, c.status, c.startedAt, c.endedAt, c.events, \
           LEFT(c.item, 32) AS item FROM c WHERE c.type IN ('payload', 'execution')",
};

/// What the turns of an instance owe to others. Index: `type`.
pub(crate) const INTENTS: QueryText = QueryText { name: "intents", text: "SELECT * FROM c WHERE c.type = 'intent'" };

/// Whose documents somebody should have looked at by now. Index: `due`, `type`.
pub(crate) const OVERDUE: QueryText = QueryText {
    name: "overdue",
    text: "SELECT c.instanceId FROM c WHERE c.due <= @until AND c.type IN ('message', 'work', 'intent', 'instance')",
};

/// Whose documents there are that an instance has, but for its own. Index: `type`.
pub(crate) const WITH_ANYTHING: QueryText = QueryText {
    name: "with_anything",
    text: "SELECT c.instanceId FROM c WHERE c.type IN ('history', 'message', 'work', 'payload', 'staged')",
};

/// All values of an instance. Index: `type`.
pub(crate) const VALUES: QueryText = QueryText { name: "values", text: "SELECT * FROM c WHERE c.type = 'kv'" };

/// The executions of an instance but the current one. Index: `type`.
pub(crate) const EXECUTIONS: QueryText = QueryText {
    name: "executions",
    text: "SELECT c.execution, c.status, c.endedAt, c.events FROM c WHERE c.type = 'execution'",
};

/// Every document of a partition, with what an erasure must know of it.
pub(crate) const CONTENTS: QueryText = QueryText {
    name: "contents",
    text: "SELECT c.id, c._etag, c.type, c.due, c.seq, c.starts, c.delivered, c.execution FROM c",
};

/// What turns are made of, oldest first: messages, half-finished instances, intents. What has no slot is anybody's. Of instances only those
/// that are due already: most of the others are locked until then. Index: `due`, `type`.
pub(crate) const DUE_TURNS: QueryText = QueryText {
    name: "due_turns",
    text: "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.starts, c.by FROM c \
           WHERE c.due <= @until AND (c.type IN ('message', 'intent') OR (c.type = 'instance' AND c.due <= @now)) \
           AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) ORDER BY c.due",
};

/// Activities that somebody here can run, oldest first, whole: a claim needs no read before it. Index: `due`, `type`, `tag`.
pub(crate) const DUE_WORK: QueryText = QueryText {
    name: "due_work",
    text: "SELECT * FROM c WHERE c.due <= @until AND c.type = 'work' \
           AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
           AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR ARRAY_CONTAINS(@tags, c.tag)) \
           ORDER BY c.due",
};

/// The same, newest first, for those who help: who knows of them takes the oldest. Index: `due`, `type`, `tag`.
pub(crate) const LAST_WORK: QueryText = QueryText {
    name: "last_work",
    text: "SELECT * FROM c WHERE c.due <= @until AND c.type = 'work' \
           AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
           AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR ARRAY_CONTAINS(@tags, c.tag)) \
           ORDER BY c.due DESC",
};

/// The same without what a claim needs, for those behind many that can't be taken. Index: `due`, `type`, `tag`.
pub(crate) const DUE_WORK_ROWS: QueryText = QueryText {
    name: "due_work_rows",
    text: "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.tag, c.sessionId, c.by FROM c \
           WHERE c.due <= @until AND c.type = 'work' \
           AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
           AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR ARRAY_CONTAINS(@tags, c.tag)) \
           ORDER BY c.due",
};

/// Everything that somebody here can take, of both queues, oldest first. Index: `due`, `type`, `tag`.
pub(crate) const DUE: QueryText = QueryText {
    name: "due",
    text: "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.starts, c.tag, c.sessionId, c.by FROM c \
           WHERE c.due <= @until AND (c.type IN ('message', 'intent') \
           OR (c.type = 'instance' AND c.due <= @now) OR (c.type = 'work' \
           AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR ARRAY_CONTAINS(@tags, c.tag)))) \
           ORDER BY c.due",
};

/// Those who look for work. Index: `type`.
pub(crate) const MEMBERS: QueryText = QueryText { name: "members", text: "SELECT * FROM c WHERE c.type = 'member'" };

/// Intents that the process which committed them has not delivered, oldest first. Index: `due`, `type`.
pub(crate) const DUE_INTENTS: QueryText = QueryText {
    name: "due_intents",
    text: "SELECT TOP 100 * FROM c WHERE c.due <= @now AND c.type = 'intent' ORDER BY c.due",
};

/// Sessions of some owners. Index: `type`, `owner`, `lockedUntil`.
pub(crate) const SESSIONS_OF: QueryText = QueryText {
    name: "sessions_of",
    text: "SELECT * FROM c WHERE c.type = 'session' AND ARRAY_CONTAINS(@owners, c.owner) AND c.lockedUntil > @now",
};

/// Sessions whose lock has expired, from a time on. Index: `type`, `lockedUntil`.
pub(crate) const EXPIRED_SESSIONS: QueryText = QueryText {
    name: "expired_sessions",
    text: "SELECT TOP 500 * FROM c WHERE c.type = 'session' AND c.lockedUntil >= @from AND c.lockedUntil < @now \
           ORDER BY c.lockedUntil",
};

/// Which of some sessions an activity waits for. Unordered `DISTINCT` needs a bound. Index: `type`, `sessionId`.
pub(crate) const WORK_OF_SESSIONS: QueryText = QueryText {
    name: "work_of_sessions",
    text: "SELECT DISTINCT TOP 1000 c.sessionId FROM c \
           WHERE c.type = 'work' AND ARRAY_CONTAINS(@sessions, c.sessionId)",
};

/// Instances, newest first. Index: `type`, `createdAt`.
pub(crate) const INSTANCES: QueryText = QueryText {
    name: "instances",
    text: "SELECT c.instanceId, c.deleting, c.status FROM c WHERE c.type = 'instance' AND IS_DEFINED(c.status) \
           ORDER BY c.createdAt DESC",
};

/// Instances with a status, newest first. Index: `type`, `status`, `createdAt`.
pub(crate) const INSTANCES_BY_STATUS: QueryText = QueryText {
    name: "instances_by_status",
    text: "SELECT c.instanceId, c.deleting, c.status FROM c WHERE c.type = 'instance' AND c.status = @status \
           ORDER BY c.createdAt DESC",
};

/// A page of instances, newest first, from a time back; what any may have is not asked for. Index: `type`, `createdAt`, `status`, `name`,
/// `parent`.
pub(crate) const INSTANCE_PAGE: QueryText = QueryText {
    name: "instance_page",
    text: "SELECT c.instanceId, c.status, c.name, c.version, c.parent, c.execution, c.createdAt, c.updatedAt, c.completedAt, \
           c.deleting FROM c WHERE c.type = 'instance' AND IS_DEFINED(c.status) \
           AND c.createdAt <= @until AND c.createdAt >= @from AND (@anyStatus = true OR c.status = @status) \
           AND (@anyName = true OR c.name = @name) AND (@anyParent = true OR c.parent = @parent) ORDER BY c.createdAt DESC",
};

/// Instances with their parent and end, for bulk operations. Index: `type`, `createdAt`.
pub(crate) const INSTANCES_TO_CLEAN: QueryText = QueryText {
    name: "instances_to_clean",
    text: "SELECT c.instanceId, c.deleting, c.status, c.parent, c.completedAt FROM c \
           WHERE c.type = 'instance' AND IS_DEFINED(c.status) ORDER BY c.createdAt",
};

/// Roots that have ended in one way by some time, those that did so first, first, whole: a mark needs no read before it. Index: `type`, `ended`.
pub(crate) const ENDED: QueryText = QueryText {
    name: "ended",
    text: "SELECT TOP 1000 * FROM c \
           WHERE c.type = 'instance' AND c.ended >= @from AND c.ended < @to ORDER BY c.ended",
};

/// The children of some instances. Index: `type`, `parent`.
pub(crate) const CHILDREN: QueryText = QueryText {
    name: "children",
    text: "SELECT c.instanceId, c.deleting, c.status, c.parent FROM c \
           WHERE c.type = 'instance' AND ARRAY_CONTAINS(@parents, c.parent)",
};

/// The same, whole. Index: `type`, `parent`.
pub(crate) const WHOLE_CHILDREN: QueryText = QueryText {
    name: "whole_children",
    text: "SELECT * FROM c WHERE c.type = 'instance' AND ARRAY_CONTAINS(@parents, c.parent)",
};

/// Instances whose figures the counters don't hold yet. Index: `type`, `tally`.
pub(crate) const OPEN_INSTANCES: QueryText = QueryText {
    name: "open_instances",
    text: "SELECT TOP 1000 c.instanceId, c.status, c.totals, c.sealed, c.deleting FROM c \
           WHERE c.type = 'instance' AND c.tally = 'open' ORDER BY c.tally",
};

/// Finished instances whose figures the counters don't hold yet, whole, so that they can be written without a read before
/// it. Which of them come first doesn't matter, so there is no order, and no more partitions are asked than it takes. Index:
/// `type`, `tally`, `status`.
pub(crate) const FINISHED_INSTANCES: QueryText = QueryText {
    name: "finished_instances",
    text: "SELECT TOP 500 * FROM c WHERE c.type = 'instance' AND c.tally = 'open' \
           AND c.status IN ('Completed', 'Failed', 'ContinuedAsNew')",
};

/// Messages in the queue, up to a bound. Index: `type`, `due`.
pub(crate) const MESSAGE_DEPTH: QueryText = QueryText {
    name: "message_depth",
    text: "SELECT TOP 1000 c.instanceId FROM c WHERE c.type = 'message' AND IS_DEFINED(c.due) ORDER BY c.due",
};

/// Activities in the queue, up to a bound. Index: `type`, `due`.
pub(crate) const WORK_DEPTH: QueryText = QueryText {
    name: "work_depth",
    text: "SELECT TOP 1000 c.lock.until FROM c WHERE c.type = 'work' AND IS_DEFINED(c.due) ORDER BY c.due",
};

/// So many messages and activities are looked at for a report.
pub(crate) const MOST_QUEUED: usize = 1_000;

/// Messages in the queue, oldest first, with what a report says of them. Index: `type`, `due`.
pub(crate) const QUEUED_MESSAGES: QueryText = QueryText {
    name: "queued_messages",
    text: "SELECT TOP 1000 c.instanceId, c.due, c.createdAt FROM c WHERE c.type = 'message' AND IS_DEFINED(c.due) \
           ORDER BY c.due",
};

/// Activities in the queue, oldest first, with what a report says of them. Index: `type`, `due`.
pub(crate) const QUEUED_WORK: QueryText = QueryText {
    name: "queued_work",
    text: "SELECT TOP 1000 c.instanceId, c.due, c.tag, c.sessionId, c.attempts, c.lock.until FROM c \
           WHERE c.type = 'work' AND IS_DEFINED(c.due) ORDER BY c.due",
};

/// Messages that turns owe and that are late, that could not be delivered so far, or never can: those have no time. Index: `type`, `due`.
pub(crate) const LATE_INTENTS: QueryText = QueryText {
    name: "late_intents",
    text: "SELECT TOP 1000 c.id, c.instanceId, c.target, c.createdAt, c.attempts, c.poisoned, LEFT(c.document.item, 64) AS item \
           FROM c WHERE c.type = 'intent' AND (c.due <= @now OR NOT IS_DEFINED(c.due) OR c.attempts > 0)",
};

/// Every query of the provider.
#[cfg(test)]
pub(crate) const ALL: &[QueryText] = &[
    TURN,
    VISIBLE_MESSAGES,
    VISIBLE_STARTS,
    QUEUED_STARTS,
    CONSUMED,
    HISTORY,
    VALUES,
    EXECUTIONS,
    CONTENTS,
    DUE,
    DUE_TURNS,
    DUE_WORK,
    LAST_WORK,
    DUE_WORK_ROWS,
    MEMBERS,
    DUE_INTENTS,
    SESSIONS_OF,
    EXPIRED_SESSIONS,
    WORK_OF_SESSIONS,
    INSTANCES,
    INSTANCES_BY_STATUS,
    INSTANCES_TO_CLEAN,
    CHILDREN,
    WHOLE_CHILDREN,
    OPEN_INSTANCES,
    FINISHED_INSTANCES,
    MESSAGE_DEPTH,
    WORK_DEPTH,
    INSTANCE_PAGE,
    ENDED,
    QUEUED_MESSAGES,
    QUEUED_WORK,
    LATE_INTENTS,
    HISTORY_ROWS,
    ANY_HISTORY,
    SMALL_DOCUMENTS,
    LARGE_DOCUMENTS,
    INTENTS,
    OVERDUE,
    WITH_ANYTHING,
];
