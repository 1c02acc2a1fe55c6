//! The text of every query, with the index that it relies on.

use super::QueryText;

/// The documents of a turn: visible messages, the history of the current execution, and values. `@deferred` is the
/// due time of deferred messages, if the turn takes them, or null. Index: `type`, `due`, `execution`.
pub(crate) const TURN: QueryText = QueryText::within(
    "turn",
    "SELECT * FROM c WHERE (c.type = 'message' AND (c.due <= @now OR c.due = @deferred)) OR c.type = 'kv' \
     OR (c.type = 'history' AND c.execution = @execution)",
);

/// The oldest visible messages of an instance whose history is cached. `@deferred` is the due time of deferred
/// messages, or null. The limit is one more than a turn takes, so the last row shows that there are more. Index:
/// `type`, `due`, `seq`.
pub(crate) const VISIBLE_MESSAGES: QueryText = QueryText::within(
    "visible_messages",
    "SELECT TOP 501 * FROM c WHERE c.type = 'message' AND (c.due <= @now OR c.due = @deferred) ORDER BY c.seq",
);

/// The visible start messages of an instance that has more messages than a turn takes. Index: `type`, `due`, `starts`.
pub(crate) const VISIBLE_STARTS: QueryText = QueryText::within(
    "visible_starts",
    "SELECT * FROM c WHERE c.type = 'message' AND c.due <= @now AND c.starts = true",
);

/// Every message of an instance, visible or not. Index: `type`.
pub(crate) const MESSAGES: QueryText = QueryText::within("messages", "SELECT * FROM c WHERE c.type = 'message'");

/// A start message in the queue of an instance, visible or not, with the incarnation of its sender. Index: `type`,
/// `starts`.
pub(crate) const QUEUED_STARTS: QueryText = QueryText::within(
    "queued_starts",
    "SELECT TOP 1 c.id, c.incarnation FROM c WHERE c.type = 'message' AND c.starts = true",
);

/// The messages from outside that the turns of an instance have consumed, in all executions. Index: `type`.
pub(crate) const CONSUMED: QueryText =
    QueryText::within("consumed", "SELECT VALUE c.consumed FROM c WHERE c.type = 'history'");

/// The history of one execution. Index: `type`, `execution`.
pub(crate) const HISTORY: QueryText =
    QueryText::within("history", "SELECT * FROM c WHERE c.type = 'history' AND c.execution = @execution");

/// The histories of all executions before `@execution`. Index: `type`, `execution`.
pub(crate) const PAST_HISTORY: QueryText =
    QueryText::within("past_history", "SELECT * FROM c WHERE c.type = 'history' AND c.execution < @execution");

/// The ids and executions of the history documents. Index: `type`.
pub(crate) const HISTORY_ROWS: QueryText =
    QueryText::within("history_rows", "SELECT c.id, c.execution FROM c WHERE c.type = 'history'");

/// One history document, if there is any. Index: `type`.
pub(crate) const ANY_HISTORY: QueryText =
    QueryText::within("any_history", "SELECT TOP 1 c.id FROM c WHERE c.type = 'history'");

/// Every whole document of a partition, except the types that may be many and large. Index: `type`.
pub(crate) const SMALL_DOCUMENTS: QueryText = QueryText::within(
    "small_documents",
    "SELECT * FROM c WHERE NOT IS_DEFINED(c.type) OR NOT (c.type IN ('history', 'payload', 'execution', 'delivered'))",
);

/// Inputs and past executions, without their large properties. Index: `type`.
pub(crate) const LARGE_DOCUMENTS: QueryText = QueryText::within(
    "large_documents",
    "SELECT c.id, c.instanceId, c._etag, c.type, c.execution, c.status, c.startedAt, c.endedAt, c.events, \
     LEFT(c.item, 32) AS item FROM c WHERE c.type IN ('payload', 'execution')",
);

/// The undelivered messages of an instance to other instances. Index: `type`.
pub(crate) const INTENTS: QueryText = QueryText::within("intents", "SELECT * FROM c WHERE c.type = 'intent'");

/// The instances with overdue documents. An intent that can't be delivered is due again and again, or never, so its age
/// counts instead. Index: `due`, `type`, `createdAt`.
pub(crate) const OVERDUE: QueryText = QueryText::across(
    "overdue",
    1000,
    "SELECT c.instanceId FROM c WHERE (c.due <= @until AND c.type IN ('message', 'activity', 'intent', 'instance')) \
     OR (c.type = 'intent' AND c.createdAt <= @until)",
);

/// The instances that have any document besides the instance document. Index: `type`.
pub(crate) const WITH_ANYTHING: QueryText = QueryText::across(
    "with_anything",
    1000,
    "SELECT c.instanceId FROM c WHERE c.type IN ('history', 'message', 'activity', 'payload', 'staged')",
);

/// All values of an instance. Index: `type`.
pub(crate) const VALUES: QueryText = QueryText::within("values", "SELECT * FROM c WHERE c.type = 'kv'");

/// The executions of an instance except the current one. Index: `type`.
pub(crate) const EXECUTIONS: QueryText = QueryText::within(
    "executions",
    "SELECT c.execution, c.status, c.endedAt, c.events FROM c WHERE c.type = 'execution'",
);

/// The executions between two numbers, oldest first. Index: `type`, `execution`.
pub(crate) const EXECUTIONS_BETWEEN: QueryText = QueryText::within(
    "executions_between",
    "SELECT c.execution, c.status, c.endedAt, c.events FROM c WHERE c.type = 'execution' \
     AND c.execution > @after AND c.execution < @below ORDER BY c.execution",
);

/// The numbers of the executions before `@below`, latest first. Index: `type`, `execution`.
pub(crate) const LAST_EXECUTIONS: QueryText = QueryText::within(
    "last_executions",
    "SELECT c.execution FROM c WHERE c.type = 'execution' AND c.execution < @below ORDER BY c.execution DESC",
);

/// The documents of the executions in a range of numbers. Index: `type`, `execution`.
pub(crate) const OF_EXECUTIONS: QueryText = QueryText::within(
    "of_executions",
    "SELECT c.id, c._etag, c.type, c.execution FROM c WHERE c.type IN ('history', 'execution') \
     AND c.execution >= @from AND c.execution <= @to",
);

/// Every document of a partition, with the properties that a deletion needs. Index: none.
pub(crate) const CONTENTS: QueryText = QueryText::within(
    "contents",
    "SELECT c.id, c._etag, c._ts, c.type, c.due, c.seq, c.starts, c.delivered, c.sender, c.incarnation FROM c",
);

/// The documents that need a turn, oldest first: messages, instances whose turn is incomplete, and intents.
///
/// Every worker takes documents without a slot. Instances must be due already, because most of the others are locked
/// until their due time. Index: `due`, `type`, `slot`.
pub(crate) const DUE_TURNS: QueryText = QueryText::across(
    "due_turns",
    50,
    "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.starts, c.knownBy FROM c \
     WHERE c.due <= @until AND (c.type IN ('message', 'intent') OR (c.type = 'instance' AND c.due <= @now)) \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) ORDER BY c.due",
);

/// Whole activities that a dispatcher of this process can run, oldest first. A claim needs no read before it. Index:
/// `due`, `type`, `tag`, `slot`.
pub(crate) const DUE_ACTIVITIES: QueryText = QueryText::across(
    "due_activities",
    50,
    "SELECT * FROM c WHERE c.due <= @until AND c.type = 'activity' \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)) \
     ORDER BY c.due",
);

/// The same activities, newest first, for a worker that helps another one. The other worker takes the oldest. Index:
/// `due`, `type`, `tag`, `slot`.
pub(crate) const LAST_ACTIVITIES: QueryText = QueryText::across(
    "last_activities",
    200,
    "SELECT * FROM c WHERE c.due <= @until AND c.type = 'activity' \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)) \
     ORDER BY c.due DESC",
);

/// The same activities without the properties that a claim needs, to look behind many that can't be claimed. Index:
/// `due`, `type`, `tag`, `slot`.
pub(crate) const DUE_ACTIVITY_ROWS: QueryText = QueryText::across(
    "due_activity_rows",
    250,
    "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.tag, c.sessionId, c.knownBy FROM c \
     WHERE c.due <= @until AND c.type = 'activity' \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)) \
     ORDER BY c.due",
);

/// The documents of both queues that a dispatcher of this process can take, oldest first. Index: `due`, `type`, `tag`.
pub(crate) const DUE: QueryText = QueryText::across(
    "due",
    100,
    "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.starts, c.tag, c.sessionId, c.knownBy FROM c \
     WHERE c.due <= @until AND (c.type IN ('message', 'intent') \
     OR (c.type = 'instance' AND c.due <= @now) OR (c.type = 'activity' \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)))) \
     ORDER BY c.due",
);

/// The workers of the container. Index: `type`.
pub(crate) const MEMBERS: QueryText = QueryText::within("members", "SELECT * FROM c WHERE c.type = 'member'");

/// Due intents, which the process that committed them has not delivered, oldest first. Index: `due`, `type`.
pub(crate) const DUE_INTENTS: QueryText =
    QueryText::across("due_intents", 100, "SELECT * FROM c WHERE c.due <= @now AND c.type = 'intent' ORDER BY c.due");

/// The locked sessions of some owners. Index: `type`, `owner`, `lockedUntil`.
pub(crate) const SESSIONS_OF: QueryText = QueryText::across(
    "sessions_of",
    250,
    "SELECT * FROM c WHERE c.type = 'session' AND c.owner IN (@owners) AND c.lockedUntil > @now",
);

/// The sessions whose lock expired since `@from`. Index: `type`, `lockedUntil`.
pub(crate) const EXPIRED_SESSIONS: QueryText = QueryText::across(
    "expired_sessions",
    250,
    "SELECT TOP 500 * FROM c WHERE c.type = 'session' AND c.lockedUntil >= @from AND c.lockedUntil < @now \
     ORDER BY c.lockedUntil",
);

/// The sessions of a list that have a waiting activity. Unordered `DISTINCT` needs a limit. Index: `type`, `sessionId`.
pub(crate) const ACTIVITIES_OF_SESSIONS: QueryText = QueryText::across(
    "activities_of_sessions",
    250,
    "SELECT DISTINCT TOP 1000 c.sessionId FROM c \
     WHERE c.type = 'activity' AND c.sessionId IN (@sessions)",
);

/// Instances, newest first. Index: `type`, `createdAt`.
pub(crate) const INSTANCES: QueryText = QueryText::across(
    "instances",
    1000,
    "SELECT c.instanceId, c.deleting, c.status FROM c WHERE c.type = 'instance' AND IS_DEFINED(c.status) \
     ORDER BY c.createdAt DESC",
);

/// Instances with a status, newest first. Index: `type`, `status`, `createdAt`.
pub(crate) const INSTANCES_BY_STATUS: QueryText = QueryText::across(
    "instances_by_status",
    1000,
    "SELECT c.instanceId, c.deleting, c.status FROM c WHERE c.type = 'instance' AND c.status = @status \
     ORDER BY c.createdAt DESC",
);

/// A page of instances between two times, newest first. The `@any…` parameters turn single filters off. Index: `type`,
/// `createdAt`, `status`, `name`, `parent`.
pub(crate) const INSTANCE_PAGE: QueryText = QueryText::across(
    "instance_page",
    250,
    "SELECT c.instanceId, c.status, c.name, c.version, c.parent, c.execution, c.createdAt, c.updatedAt, c.completedAt, \
     c.deleting FROM c WHERE c.type = 'instance' AND IS_DEFINED(c.status) \
     AND c.createdAt <= @until AND c.createdAt >= @from AND (@anyStatus = true OR c.status = @status) \
     AND (@anyName = true OR c.name = @name) AND (@anyParent = true OR c.parent = @parent) ORDER BY c.createdAt DESC",
);

/// Instances with their parent and completion time, for bulk operations. Index: `type`, `createdAt`.
pub(crate) const INSTANCES_TO_CLEAN: QueryText = QueryText::across(
    "instances_to_clean",
    1000,
    "SELECT c.instanceId, c.deleting, c.status, c.parent, c.completedAt, c.incarnation, c.epoch FROM c \
     WHERE c.type = 'instance' AND IS_DEFINED(c.status) ORDER BY c.createdAt",
);

/// Whole root instances with one final status that ended in a range of times, oldest first. Preparing their deletion
/// needs no read before it. Index: `type`, `ended`.
pub(crate) const ENDED: QueryText = QueryText::across(
    "ended",
    250,
    "SELECT TOP 1000 * FROM c \
     WHERE c.type = 'instance' AND c.ended >= @from AND c.ended < @to ORDER BY c.ended",
);

/// The children of some instances. Index: `type`, `parent`.
pub(crate) const CHILDREN: QueryText = QueryText::across(
    "children",
    1000,
    "SELECT c.instanceId, c.deleting, c.status, c.parent FROM c \
     WHERE c.type = 'instance' AND c.parent IN (@parents)",
);

/// The children of some instances, and the undelivered messages of these instances. Index: `type`, `parent`.
pub(crate) const DEPENDENTS: QueryText = QueryText::across(
    "dependents",
    1000,
    "SELECT c.type, c.id, c.instanceId, c.deleting, c.status, c.parent, c.target, c.incarnation FROM c \
     WHERE c.type IN ('instance', 'intent') AND c.parent IN (@parents)",
);

/// The whole documents of the children of some instances. Index: `type`, `parent`.
pub(crate) const WHOLE_CHILDREN: QueryText =
    QueryText::across("whole_children", 250, "SELECT * FROM c WHERE c.type = 'instance' AND c.parent IN (@parents)");

/// Instances whose figures are not in the counters yet. Index: `type`, `countPending`.
pub(crate) const OPEN_INSTANCES: QueryText = QueryText::across(
    "open_instances",
    250,
    "SELECT TOP 1000 c.instanceId, c.status, c.totals, c.counted, c.deleting FROM c \
     WHERE c.type = 'instance' AND c.countPending = 'open' ORDER BY c.countPending",
);

/// Whole finished instances whose figures are not in the counters yet. A write of them needs no read before it. Their
/// order does not matter, so the query has none, and asks only as many partitions as it needs. Index: `type`,
/// `countPending`, `status`.
pub(crate) const FINISHED_INSTANCES: QueryText = QueryText::across(
    "finished_instances",
    250,
    "SELECT TOP 500 * FROM c WHERE c.type = 'instance' AND c.countPending = 'open' \
     AND c.status IN ('Completed', 'Failed')",
);

/// Messages in the queue, up to a limit. Index: `type`, `due`.
pub(crate) const MESSAGE_DEPTH: QueryText = QueryText::across(
    "message_depth",
    250,
    "SELECT TOP 1000 c.instanceId FROM c WHERE c.type = 'message' AND IS_DEFINED(c.due) ORDER BY c.due",
);

/// Activities in the queue, up to a limit. Index: `type`, `due`.
pub(crate) const ACTIVITY_DEPTH: QueryText = QueryText::across(
    "activity_depth",
    250,
    "SELECT TOP 1000 c.lock.until FROM c WHERE c.type = 'activity' AND IS_DEFINED(c.due) ORDER BY c.due",
);

/// The largest number of messages, and of activities, in a report.
pub(crate) const MOST_QUEUED: usize = 1_000;

/// Messages in the queue, oldest first, with the properties of a report. Index: `type`, `due`.
pub(crate) const QUEUED_MESSAGES: QueryText = QueryText::across(
    "queued_messages",
    250,
    "SELECT TOP 1000 c.instanceId, c.due, c.createdAt FROM c WHERE c.type = 'message' AND IS_DEFINED(c.due) \
     ORDER BY c.due",
);

/// Activities in the queue, oldest first, with the properties of a report. Index: `type`, `due`.
pub(crate) const QUEUED_ACTIVITIES: QueryText = QueryText::across(
    "queued_activities",
    250,
    "SELECT TOP 1000 c.instanceId, c.due, c.tag, c.sessionId, c.attempts, c.lock.until FROM c \
     WHERE c.type = 'activity' AND IS_DEFINED(c.due) ORDER BY c.due",
);

/// Undelivered messages that are due, that failed at least once, or that can't be delivered. The last ones have no due
/// time. Index: `type`, `due`, `retries`.
pub(crate) const LATE_INTENTS: QueryText = QueryText::across(
    "late_intents",
    250,
    "SELECT TOP 1000 c.id, c.instanceId, c.target, c.createdAt, c.retries, c.poisoned, LEFT(c.document.item, 64) \
     AS item FROM c WHERE c.type = 'intent' AND (c.due <= @now OR NOT IS_DEFINED(c.due) OR c.retries > 0)",
);

/// Every query of the provider, for the tests of their texts and for `check --deep`.
pub(crate) const ALL: &[QueryText] = &[
    TURN,
    VISIBLE_MESSAGES,
    VISIBLE_STARTS,
    QUEUED_STARTS,
    MESSAGES,
    CONSUMED,
    HISTORY,
    PAST_HISTORY,
    VALUES,
    EXECUTIONS,
    EXECUTIONS_BETWEEN,
    LAST_EXECUTIONS,
    OF_EXECUTIONS,
    CONTENTS,
    DUE,
    DUE_TURNS,
    DUE_ACTIVITIES,
    LAST_ACTIVITIES,
    DUE_ACTIVITY_ROWS,
    MEMBERS,
    DUE_INTENTS,
    SESSIONS_OF,
    EXPIRED_SESSIONS,
    ACTIVITIES_OF_SESSIONS,
    INSTANCES,
    INSTANCES_BY_STATUS,
    INSTANCES_TO_CLEAN,
    CHILDREN,
    DEPENDENTS,
    WHOLE_CHILDREN,
    OPEN_INSTANCES,
    FINISHED_INSTANCES,
    MESSAGE_DEPTH,
    ACTIVITY_DEPTH,
    INSTANCE_PAGE,
    ENDED,
    QUEUED_MESSAGES,
    QUEUED_ACTIVITIES,
    LATE_INTENTS,
    HISTORY_ROWS,
    ANY_HISTORY,
    SMALL_DOCUMENTS,
    LARGE_DOCUMENTS,
    INTENTS,
    OVERDUE,
    WITH_ANYTHING,
];
