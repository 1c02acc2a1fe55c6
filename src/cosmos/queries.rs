//! Every query that we send, each with the index that it relies on, parameters always bound.
//!
//! A test walks [`ALL`] and fails where a path that a query filters or orders by is not in the indexing policy.

use super::{error::StoreError, request_options::RequestOptions, Freshness};
use azure_data_cosmos::Query;
use serde::Serialize;
use serde_json::Value;
use std::{borrow::Cow, num::NonZeroU32};

/// The text of a query, the name under which it appears in logs, and which partitions it asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryText {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// Rows in a page of one physical partition. Queries across partitions always have one: `TOP` never reaches the
    /// partitions, so without it each of them returns a page of the service's choice.
    page: Option<NonZeroU32>,
}

/// A query with its parameters bound.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    name: &'static str,
    text: Cow<'static, str>,
    parameters: Vec<(String, Value)>,
    page_size: Option<NonZeroU32>,
    request_options: RequestOptions,
}

impl QueryText {
    /// A query of one logical partition.
    pub(crate) const fn within(name: &'static str, text: &'static str) -> Self {
        Self { name, text, page: None }
    }

    /// A query of several partitions, with at most `page` rows in a page of each.
    pub(crate) const fn across(name: &'static str, page: u32, text: &'static str) -> Self {
        Self { name, text, page: NonZeroU32::new(page) }
    }

    /// Whether it asks several partitions.
    pub(crate) fn is_across(self) -> bool {
        self.page.is_some()
    }

    /// The query without parameters yet.
    pub(crate) fn statement(self) -> Statement {
        let Self { name, text, page } = self;
        Statement {
            name,
            text: Cow::Borrowed(text),
            parameters: Vec::new(),
            page_size: page,
            request_options: RequestOptions::default(),
        }
    }
}

impl Statement {
    /// Binds a parameter; `name` begins with `@`.
    pub(crate) fn bind(mut self, name: &str, value: impl Serialize) -> Self {
        debug_assert!(self.text.contains(name), "{} has no parameter {name}", self.name);
        // Only strings, numbers and lists of them are bound, and those always serialise.
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        self.parameters.push((name.to_owned(), value));
        self
    }

    /// Binds the values of an `IN (@list)`: each gets a parameter of its own, so that the service can use the index. An
    /// empty list matches nothing.
    pub(crate) fn bind_list<S: AsRef<str>>(mut self, list: &str, values: impl IntoIterator<Item = S>) -> Self {
        let placeholder = format!("({list})");
        debug_assert!(self.text.contains(&placeholder), "{} has no list {list}", self.name);
        let mut names = Vec::new();
        for (index, value) in values.into_iter().enumerate() {
            names.push(format!("{list}{index}"));
            self.parameters.push((format!("{list}{index}"), Value::from(value.as_ref())));
        }
        // No property that is indexed here is ever null.
        let inside = if names.is_empty() { "null".to_owned() } else { names.join(", ") };
        self.text = Cow::Owned(self.text.replace(&placeholder, &format!("({inside})")));
        self
    }

    /// At most this many rows in each physical partition's page.
    pub(crate) fn in_pages_of(mut self, rows: NonZeroU32) -> Self {
        self.page_size = Some(rows);
        self
    }

    /// Sees everything that was committed in the region that answers, not just what this process knows of: where others tell
    /// that there is something, and a replica that lags would swallow it.
    pub(crate) fn latest_committed(mut self) -> Self {
        self.request_options = self.request_options.latest_committed();
        self
    }

    /// Asks the write region for everything that was committed: for queries whose answer decides something.
    pub(crate) fn authoritative(mut self) -> Self {
        self.request_options = self.request_options.authoritative();
        self
    }

    /// Sees what a read of this freshness sees.
    pub(crate) fn seeing(self, freshness: Freshness) -> Self {
        match freshness {
            Freshness::Session => self,
            Freshness::Authoritative => self.authoritative(),
        }
    }

    /// Where throughput is short, everything else goes first.
    pub(crate) fn in_background(mut self) -> Self {
        self.request_options = self.request_options.in_background();
        self
    }

    pub(super) fn request_options(&self) -> RequestOptions {
        self.request_options
    }

    pub(super) fn page_size(&self) -> Option<NonZeroU32> {
        self.page_size
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn into_query(self) -> Result<Query, StoreError> {
        let mut query = Query::from(self.text.into_owned());
        for (name, value) in self.parameters {
            query = query.with_parameter(&name, value).map_err(|e| StoreError::Malformed {
                detail: format!("the parameter {name} of {} can't be written: {e}", self.name),
            })?;
        }
        Ok(query)
    }
}

/// Cuts a list of names, each of which may be long, into parts of at most `most` that each fit the parameters of one query.
pub(crate) fn names_in_questions<S: AsRef<str>>(names: &[S], most: usize) -> Vec<&[S]> {
    const BYTES: usize = 100_000;
    let mut parts = Vec::new();
    let (mut from, mut bytes) = (0, 0);
    for (at, name) in names.iter().enumerate() {
        if at > from && (at - from == most || bytes + name.as_ref().len() > BYTES) {
            parts.push(&names[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += name.as_ref().len();
    }
    if from < names.len() {
        parts.push(&names[from..]);
    }
    parts
}

/// What a turn needs, in one question: visible messages, and deferred ones where `@deferred` says how to tell them, the current
/// execution's history, values. Index: `type`, `due`, `execution`.
pub(crate) const TURN: QueryText = QueryText::within(
    "turn",
    "SELECT * FROM c WHERE (c.type = 'message' AND (c.due <= @now OR c.due = @deferred)) OR c.type = 'kv' \
     OR (c.type = 'history' AND c.execution = @execution)",
);

/// The oldest visible messages of an instance whose history is known, and deferred ones where `@deferred` says how to tell them:
/// one more than go into a turn tells that there are more. Index: `type`, `due`, `seq`.
pub(crate) const VISIBLE_MESSAGES: QueryText = QueryText::within(
    "visible_messages",
    "SELECT TOP 501 * FROM c WHERE c.type = 'message' AND (c.due <= @now OR c.due = @deferred) ORDER BY c.seq",
);

/// The visible starts of an instance that has more messages than go into a turn. Index: `type`, `due`, `starts`.
pub(crate) const VISIBLE_STARTS: QueryText = QueryText::within(
    "visible_starts",
    "SELECT * FROM c WHERE c.type = 'message' AND c.due <= @now AND c.starts = true",
);

/// Every message of an instance, visible or not. Index: `type`.
pub(crate) const MESSAGES: QueryText = QueryText::within("messages", "SELECT * FROM c WHERE c.type = 'message'");

/// Whether an instance has a start in its queue, visible or not, and which instance has sent it. Index: `type`, `starts`.
pub(crate) const QUEUED_STARTS: QueryText = QueryText::within(
    "queued_starts",
    "SELECT TOP 1 c.id, c.incarnation FROM c WHERE c.type = 'message' AND c.starts = true",
);

/// What the turns of an instance have consumed from outside, in all executions. Index: `type`.
pub(crate) const CONSUMED: QueryText =
    QueryText::within("consumed", "SELECT VALUE c.consumed FROM c WHERE c.type = 'history'");

/// The history of one execution. Index: `type`, `execution`.
pub(crate) const HISTORY: QueryText =
    QueryText::within("history", "SELECT * FROM c WHERE c.type = 'history' AND c.execution = @execution");

/// The histories of the executions before one. Index: `type`, `execution`.
pub(crate) const PAST_HISTORY: QueryText =
    QueryText::within("past_history", "SELECT * FROM c WHERE c.type = 'history' AND c.execution < @execution");

/// Which turns have written history documents. Index: `type`.
pub(crate) const HISTORY_ROWS: QueryText =
    QueryText::within("history_rows", "SELECT c.id, c.execution FROM c WHERE c.type = 'history'");

/// Whether there is any history. Index: `type`.
pub(crate) const ANY_HISTORY: QueryText =
    QueryText::within("any_history", "SELECT TOP 1 c.id FROM c WHERE c.type = 'history'");

/// Every document of a partition, whole, but those that may be many and large. Index: `type`.
pub(crate) const SMALL_DOCUMENTS: QueryText = QueryText::within(
    "small_documents",
    "SELECT * FROM c WHERE NOT IS_DEFINED(c.type) OR NOT (c.type IN ('history', 'payload', 'execution', 'delivered'))",
);

/// Inputs and past executions, without what may be large. Index: `type`.
pub(crate) const LARGE_DOCUMENTS: QueryText = QueryText::within(
    "large_documents",
    "SELECT c.id, c.instanceId, c._etag, c.type, c.execution, c.status, c.startedAt, c.endedAt, c.events, \
     LEFT(c.item, 32) AS item FROM c WHERE c.type IN ('payload', 'execution')",
);

/// What the turns of an instance owe to others. Index: `type`.
pub(crate) const INTENTS: QueryText = QueryText::within("intents", "SELECT * FROM c WHERE c.type = 'intent'");

/// Whose documents somebody should have looked at by now. An intent that can't be delivered is due again and again, or
/// never: it is told by its age. Index: `due`, `type`, `createdAt`.
pub(crate) const OVERDUE: QueryText = QueryText::across(
    "overdue",
    1000,
    "SELECT c.instanceId FROM c WHERE (c.due <= @until AND c.type IN ('message', 'activity', 'intent', 'instance')) \
     OR (c.type = 'intent' AND c.createdAt <= @until)",
);

/// Whose documents there are that an instance has, but for its own. Index: `type`.
pub(crate) const WITH_ANYTHING: QueryText = QueryText::across(
    "with_anything",
    1000,
    "SELECT c.instanceId FROM c WHERE c.type IN ('history', 'message', 'activity', 'payload', 'staged')",
);

/// All values of an instance. Index: `type`.
pub(crate) const VALUES: QueryText = QueryText::within("values", "SELECT * FROM c WHERE c.type = 'kv'");

/// The executions of an instance but the current one. Index: `type`.
pub(crate) const EXECUTIONS: QueryText = QueryText::within(
    "executions",
    "SELECT c.execution, c.status, c.endedAt, c.events FROM c WHERE c.type = 'execution'",
);

/// Executions between two numbers, the oldest first. Index: `type`, `execution`.
pub(crate) const EXECUTIONS_BETWEEN: QueryText = QueryText::within(
    "executions_between",
    "SELECT c.execution, c.status, c.endedAt, c.events FROM c WHERE c.type = 'execution' \
     AND c.execution > @after AND c.execution < @below ORDER BY c.execution",
);

/// The numbers of the executions before one, the latest first. Index: `type`, `execution`.
pub(crate) const LAST_EXECUTIONS: QueryText = QueryText::within(
    "last_executions",
    "SELECT c.execution FROM c WHERE c.type = 'execution' AND c.execution < @below ORDER BY c.execution DESC",
);

/// The documents of executions from one number to another. Index: `type`, `execution`.
pub(crate) const OF_EXECUTIONS: QueryText = QueryText::within(
    "of_executions",
    "SELECT c.id, c._etag, c.type, c.execution FROM c WHERE c.type IN ('history', 'execution') \
     AND c.execution >= @from AND c.execution <= @to",
);

/// Every document of a partition, with what an erasure must know of it.
pub(crate) const CONTENTS: QueryText = QueryText::within(
    "contents",
    "SELECT c.id, c._etag, c._ts, c.type, c.due, c.seq, c.starts, c.delivered, c.sender, c.incarnation FROM c",
);

/// What turns are made of, oldest first: messages, half-finished instances, intents. What has no slot is anybody's. Of instances only those
/// that are due already: most of the others are locked until then. Index: `due`, `type`.
pub(crate) const DUE_TURNS: QueryText = QueryText::across(
    "due_turns",
    50,
    "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.starts, c.knownBy FROM c \
     WHERE c.due <= @until AND (c.type IN ('message', 'intent') OR (c.type = 'instance' AND c.due <= @now)) \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) ORDER BY c.due",
);

/// Activities that somebody here can run, oldest first, whole: a claim needs no read before it. Index: `due`, `type`, `tag`.
pub(crate) const DUE_ACTIVITIES: QueryText = QueryText::across(
    "due_work",
    50,
    "SELECT * FROM c WHERE c.due <= @until AND c.type = 'activity' \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)) \
     ORDER BY c.due",
);

/// The same, newest first, for those who help: who knows of them takes the oldest. Index: `due`, `type`, `tag`.
pub(crate) const LAST_ACTIVITIES: QueryText = QueryText::across(
    "last_work",
    200,
    "SELECT * FROM c WHERE c.due <= @until AND c.type = 'activity' \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)) \
     ORDER BY c.due DESC",
);

/// The same without what a claim needs, for those behind many that can't be taken. Index: `due`, `type`, `tag`.
pub(crate) const DUE_ACTIVITY_ROWS: QueryText = QueryText::across(
    "due_work_rows",
    250,
    "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.tag, c.sessionId, c.knownBy FROM c \
     WHERE c.due <= @until AND c.type = 'activity' \
     AND (NOT IS_DEFINED(c.slot) OR (c.slot >= @from AND c.slot < @to)) \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)) \
     ORDER BY c.due",
);

/// Everything that somebody here can take, of both queues, oldest first. Index: `due`, `type`, `tag`.
pub(crate) const DUE: QueryText = QueryText::across(
    "due",
    100,
    "SELECT c.id, c.instanceId, c.type, c.due, c.seq, c.starts, c.tag, c.sessionId, c.knownBy FROM c \
     WHERE c.due <= @until AND (c.type IN ('message', 'intent') \
     OR (c.type = 'instance' AND c.due <= @now) OR (c.type = 'activity' \
     AND (@any = true OR (@untagged = true AND NOT IS_DEFINED(c.tag)) OR c.tag IN (@tags)))) \
     ORDER BY c.due",
);

/// Those who look for work. Index: `type`.
pub(crate) const MEMBERS: QueryText = QueryText::within("members", "SELECT * FROM c WHERE c.type = 'member'");

/// Intents that the process which committed them has not delivered, oldest first. Index: `due`, `type`.
pub(crate) const DUE_INTENTS: QueryText =
    QueryText::across("due_intents", 100, "SELECT * FROM c WHERE c.due <= @now AND c.type = 'intent' ORDER BY c.due");

/// Sessions of some owners. Index: `type`, `owner`, `lockedUntil`.
pub(crate) const SESSIONS_OF: QueryText = QueryText::across(
    "sessions_of",
    250,
    "SELECT * FROM c WHERE c.type = 'session' AND c.owner IN (@owners) AND c.lockedUntil > @now",
);

/// Sessions whose lock has expired, from a time on. Index: `type`, `lockedUntil`.
pub(crate) const EXPIRED_SESSIONS: QueryText = QueryText::across(
    "expired_sessions",
    250,
    "SELECT TOP 500 * FROM c WHERE c.type = 'session' AND c.lockedUntil >= @from AND c.lockedUntil < @now \
     ORDER BY c.lockedUntil",
);

/// Which of some sessions an activity waits for. Unordered `DISTINCT` needs a bound. Index: `type`, `sessionId`.
pub(crate) const ACTIVITIES_OF_SESSIONS: QueryText = QueryText::across(
    "work_of_sessions",
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

/// A page of instances, newest first, from a time back; what any may have is not asked for. Index: `type`, `createdAt`, `status`, `name`,
/// `parent`.
pub(crate) const INSTANCE_PAGE: QueryText = QueryText::across(
    "instance_page",
    250,
    "SELECT c.instanceId, c.status, c.name, c.version, c.parent, c.execution, c.createdAt, c.updatedAt, c.completedAt, \
     c.deleting FROM c WHERE c.type = 'instance' AND IS_DEFINED(c.status) \
     AND c.createdAt <= @until AND c.createdAt >= @from AND (@anyStatus = true OR c.status = @status) \
     AND (@anyName = true OR c.name = @name) AND (@anyParent = true OR c.parent = @parent) ORDER BY c.createdAt DESC",
);

/// Instances with their parent and end, for bulk operations. Index: `type`, `createdAt`.
pub(crate) const INSTANCES_TO_CLEAN: QueryText = QueryText::across(
    "instances_to_clean",
    1000,
    "SELECT c.instanceId, c.deleting, c.status, c.parent, c.completedAt, c.incarnation, c.epoch FROM c \
     WHERE c.type = 'instance' AND IS_DEFINED(c.status) ORDER BY c.createdAt",
);

/// Roots that have ended in one way by some time, those that did so first, first, whole: a mark needs no read before it. Index: `type`, `ended`.
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

/// The children of some instances, and the messages that these instances still owe to others. Index: `type`, `parent`.
pub(crate) const DEPENDENTS: QueryText = QueryText::across(
    "dependents",
    1000,
    "SELECT c.type, c.id, c.instanceId, c.deleting, c.status, c.parent, c.target, c.incarnation FROM c \
     WHERE c.type IN ('instance', 'intent') AND c.parent IN (@parents)",
);

/// The children of some instances, whole. Index: `type`, `parent`.
pub(crate) const WHOLE_CHILDREN: QueryText =
    QueryText::across("whole_children", 250, "SELECT * FROM c WHERE c.type = 'instance' AND c.parent IN (@parents)");

/// Instances whose figures the counters don't hold yet. Index: `type`, `count_pending`.
pub(crate) const OPEN_INSTANCES: QueryText = QueryText::across(
    "open_instances",
    250,
    "SELECT TOP 1000 c.instanceId, c.status, c.totals, c.counted, c.deleting FROM c \
     WHERE c.type = 'instance' AND c.countPending = 'open' ORDER BY c.countPending",
);

/// Finished instances whose figures the counters don't hold yet, whole, so that they can be written without a read before
/// it. Which of them come first doesn't matter, so there is no order, and no more partitions are asked than it takes. Index:
/// `type`, `count_pending`, `status`.
pub(crate) const FINISHED_INSTANCES: QueryText = QueryText::across(
    "finished_instances",
    250,
    "SELECT TOP 500 * FROM c WHERE c.type = 'instance' AND c.countPending = 'open' \
     AND c.status IN ('Completed', 'Failed')",
);

/// Messages in the queue, up to a bound. Index: `type`, `due`.
pub(crate) const MESSAGE_DEPTH: QueryText = QueryText::across(
    "message_depth",
    250,
    "SELECT TOP 1000 c.instanceId FROM c WHERE c.type = 'message' AND IS_DEFINED(c.due) ORDER BY c.due",
);

/// Activities in the queue, up to a bound. Index: `type`, `due`.
pub(crate) const ACTIVITY_DEPTH: QueryText = QueryText::across(
    "work_depth",
    250,
    "SELECT TOP 1000 c.lock.until FROM c WHERE c.type = 'activity' AND IS_DEFINED(c.due) ORDER BY c.due",
);

/// So many messages and activities are looked at for a report.
pub(crate) const MOST_QUEUED: usize = 1_000;

/// Messages in the queue, oldest first, with what a report says of them. Index: `type`, `due`.
pub(crate) const QUEUED_MESSAGES: QueryText = QueryText::across(
    "queued_messages",
    250,
    "SELECT TOP 1000 c.instanceId, c.due, c.createdAt FROM c WHERE c.type = 'message' AND IS_DEFINED(c.due) \
     ORDER BY c.due",
);

/// Activities in the queue, oldest first, with what a report says of them. Index: `type`, `due`.
pub(crate) const QUEUED_ACTIVITIES: QueryText = QueryText::across(
    "queued_work",
    250,
    "SELECT TOP 1000 c.instanceId, c.due, c.tag, c.sessionId, c.attempts, c.lock.until FROM c \
     WHERE c.type = 'activity' AND IS_DEFINED(c.due) ORDER BY c.due",
);

/// Messages that turns owe and that are late, that could not be delivered so far, or never can: those have no time. Index: `type`, `due`,
/// `retries`.
pub(crate) const LATE_INTENTS: QueryText = QueryText::across(
    "late_intents",
    250,
    "SELECT TOP 1000 c.id, c.instanceId, c.target, c.createdAt, c.retries, c.poisoned, LEFT(c.document.item, 64) AS item \
     FROM c WHERE c.type = 'intent' AND (c.due <= @now OR NOT IS_DEFINED(c.due) OR c.retries > 0)",
);

/// Every query of the provider, for the tests that check their texts and for `check --deep`.
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

impl QueryText {
    /// The query with parameters of the kinds that it gets in earnest: for checks that send every query once.
    pub(crate) fn sample(self) -> Statement {
        let mut statement = self.statement();
        for name in parameters(self.text) {
            let list = format!("({name})");
            statement = if self.text.contains(&list) {
                statement.bind_list(name, ["one", "two"])
            } else {
                statement.bind(name, sample_value(self.name, name))
            };
        }
        statement
    }
}

/// The parameters of a text, each once.
fn parameters(text: &str) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for (at, _) in text.match_indices('@') {
        let rest = &text[at..];
        let end = rest[1..].find(|c: char| !c.is_ascii_alphanumeric()).map_or(rest.len(), |end| end + 1);
        if !names.contains(&&rest[..end]) {
            names.push(&rest[..end]);
        }
    }
    names
}

/// A value of the kind that a parameter has.
fn sample_value(query: &str, parameter: &str) -> Value {
    match (query, parameter) {
        (_, "@any" | "@untagged" | "@anyStatus" | "@anyName" | "@anyParent") => Value::Bool(false),
        (_, "@status" | "@name" | "@parent") | ("ended", _) => Value::from("sample"),
        (_, "@deferred") => Value::Null,
        _ => Value::from(1_763_256_000_000_u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use duroxide_cosmos_emulator::sql;

    #[test]
    fn every_query_is_in_the_list() {
        let source = include_str!("queries.rs");
        let declared =
            source.lines().filter(|line| line.starts_with("pub(crate) const ") && line.contains(": QueryText"));
        assert_eq!(declared.count(), ALL.len());
    }

    #[test]
    fn a_query_with_top_has_a_page_size_unless_it_asks_one_partition() {
        const ONE_PARTITION: [&str; 3] = ["visible_messages", "queued_starts", "any_history"];
        for query in ALL.iter().filter(|query| query.text.contains(" TOP ")) {
            assert!(query.page.is_some() || ONE_PARTITION.contains(&query.name), "{}", query.name);
        }
    }

    #[test]
    fn every_text_is_in_the_published_grammar() {
        let wrong: Vec<String> = ALL
            .iter()
            .flat_map(|query| [(query.name, query.text.to_owned()), (query.name, query.sample().text.into_owned())])
            .filter_map(|(name, text)| Some(format!("{name}: {}", sql::parse(&text).err()?)))
            .collect();
        assert!(wrong.is_empty(), "the service would refuse:\n{}", wrong.join("\n"));
    }

    #[test]
    fn no_list_is_compared_by_array_contains_which_uses_no_index() {
        for query in ALL {
            let parsed = sql::parse(query.text).expect("in the grammar");
            assert!(!parsed.calls().iter().any(|call| call.is("ARRAY_CONTAINS")), "{}", query.name);
        }
    }

    #[test]
    fn a_sample_binds_every_parameter() {
        for query in ALL {
            let statement = query.sample();
            let used = sql::parse(&statement.text).expect("in the grammar").parameters().to_vec();
            let bound: Vec<&String> = statement.parameters.iter().map(|(name, _)| name).collect();
            assert!(used.iter().all(|name| bound.contains(&name)) && bound.len() == used.len(), "{}", query.name);
        }
    }

    #[test]
    fn each_value_of_a_list_gets_a_parameter_of_its_own() {
        let statement = CHILDREN.statement().bind_list("@parents", ["a", "b"]);
        assert!(statement.text.ends_with("c.parent IN (@parents0, @parents1)"), "{}", statement.text);
        assert_eq!(statement.parameters[1], ("@parents1".to_owned(), Value::from("b")));
    }

    #[test]
    fn an_empty_list_matches_nothing() {
        let statement = CHILDREN.statement().bind_list("@parents", Vec::<String>::new());
        assert!(statement.text.ends_with("c.parent IN (null)"), "{}", statement.text);
        assert!(statement.parameters.is_empty());
    }
}
