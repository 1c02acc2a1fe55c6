//! What there is: the account, instances, families, queues, the fleet.

use crate::{
    account::Account,
    output::{nobody_reads, plain, short, Output},
    times::{ago, before, length, moment, parse_length},
    End, Result,
};
use anyhow::ensure;
use clap::{builder::NonEmptyStringValueParser, Args, ValueEnum};
use duroxide_cosmos::{
    operate::{self, CheckStatus, InstancePage, InstanceQuery, InstanceSummary, Intent, IntentState, Member},
    CosmosDBProviderConfig,
};
use duroxide_cosmos_dashboard::instance;
use serde_json::json;
use std::{collections::BTreeMap, time::Duration};

/// How much is checked.
#[derive(Args)]
pub struct Check {
    /// Tries out every assumption about the service, with documents that are removed again: some seconds, about 2,600 RU.
    /// Changes
    #[arg(long)]
    deep: bool,
}

/// Says of each thing that must be right how it is.
pub async fn check(check: &Check, config: &CosmosDBProviderConfig, output: Output) -> Result {
    let checks = if check.deep { operate::check_deep(config).await } else { operate::check(config).await };
    for check in &checks {
        output.object("check", check);
        let how = match check.status {
            CheckStatus::Ok => "ok",
            CheckStatus::Warning => "poor",
            CheckStatus::Unknown => "unknown",
            CheckStatus::Differs => "DIFFERS",
            _ => "WRONG",
        };
        output.line(format!("{how:<8} {:<16} {}", check.subject, check.detail));
    }
    let is_fine = checks
        .iter()
        .all(|check| matches!(check.status, CheckStatus::Ok | CheckStatus::Warning | CheckStatus::Unknown));
    Ok(if is_fine { End::Done } else { End::Wrong })
}

/// What an instance's status can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Status {
    Running,
    Completed,
    Failed,
    /// The execution has ended, and the next is about to begin
    Continued,
}

impl Status {
    /// As it is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "Running",
            Self::Completed => "Completed",
            Self::Failed => "Failed",
            Self::Continued => "ContinuedAsNew",
        }
    }
}

/// Which instances are meant.
#[derive(Args)]
pub struct Filter {
    /// With this status
    #[arg(long, value_enum, ignore_case = true)]
    pub status: Option<Status>,
    /// Of this orchestration
    #[arg(long, value_name = "ORCHESTRATION", value_parser = NonEmptyStringValueParser::new())]
    pub name: Option<String>,
    /// The children of this instance
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    pub parent: Option<String>,
    /// With this text in the id
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub text: Option<String>,
    /// Created so long ago at most, as 15m, 2h, 7d
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    pub newer_than: Option<Duration>,
    /// Created so long ago at least
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    pub older_than: Option<Duration>,
}

impl Filter {
    /// Whether it says anything.
    pub fn is_any(&self) -> bool {
        self.status.is_none()
            && self.name.is_none()
            && self.parent.is_none()
            && self.text.is_none()
            && self.newer_than.is_none()
            && self.older_than.is_none()
    }

    pub fn query(&self) -> InstanceQuery {
        let mut query = InstanceQuery::default();
        query.status = self.status.map(|status| status.as_str().to_owned());
        (query.name, query.parent, query.text) = (self.name.clone(), self.parent.clone(), self.text.clone());
        query.created_after = self.newer_than.map(before);
        query.created_before = self.older_than.map(before);
        query
    }
}

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    filter: Filter,
    /// How many at most
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    /// Goes on where a list has ended, which says how
    #[arg(long)]
    cursor: Option<String>,
    /// All of them, page by page
    #[arg(long, conflicts_with_all = ["limit", "cursor"])]
    all: bool,
}

impl List {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let query = self.filter.query();
        if self.all {
            return Self::all(account, &query, output).await;
        }
        let page = account.provider.instances(&query, self.cursor.as_deref(), usize::from(self.limit)).await?;
        Self::tell(&page, output);
        if let Some(cursor) = &page.cursor {
            output.object("cursor", &json!({ "cursor": cursor }));
        }
        match (&page.cursor, page.instances.is_empty() && page.unreadable.is_empty()) {
            (Some(cursor), _) => output.line(format!("\nthere are more: --cursor {cursor}, or --all")),
            (None, true) => output.line("no such instances"),
            _ => {}
        }
        Ok(End::Done)
    }

    async fn all(account: &Account, query: &InstanceQuery, output: Output) -> Result {
        let mut cursor = None;
        loop {
            let page = account.provider.instances(query, cursor.as_deref(), 1_000).await?;
            Self::tell(&page, output);
            cursor = page.cursor;
            if cursor.is_none() || nobody_reads() {
                return Ok(End::Done);
            }
        }
    }

    fn tell(page: &InstancePage, output: Output) {
        let instances = &page.instances;
        for unreadable in &page.unreadable {
            output.object("unreadable", unreadable);
            let said = format!("{} can't be read by this version: {}", unreadable.id, unreadable.error);
            output.line(plain(&said));
        }
        instances.iter().for_each(|instance| output.object("instance", instance));
        let row = |instance: &InstanceSummary| {
            let took = instance.completed_at.map(|end| length(end.saturating_sub(instance.created_at)));
            vec![
                instance.status.clone(),
                ago(instance.created_at),
                took.unwrap_or_default(),
                instance.name.clone(),
                instance.id.clone(),
            ]
        };
        if !instances.is_empty() {
            output.table(&["STATUS", "CREATED", "TOOK", "ORCHESTRATION", "INSTANCE"], instances.iter().map(row));
        }
    }
}

#[derive(Args)]
pub struct Tree {
    /// The instance
    id: String,
}

impl Tree {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Some(root) = account.provider.instance(&self.id).await? else { return Ok(not_found(&self.id)) };
        let mut below: BTreeMap<String, Vec<InstanceSummary>> = BTreeMap::new();
        for member in family(account, &self.id).await? {
            if let Some(parent) = member.parent.clone().filter(|_| member.id != root.id) {
                below.entry(parent).or_default().push(member);
            }
        }
        // Deep families are possible, so this is not a function that calls itself.
        let mut next = vec![(root, 0)];
        while let Some((instance, depth)) = next.pop() {
            let mut object = json!(instance);
            object["depth"] = depth.into();
            output.object("instance", &object);
            let (name, status) = (short(&instance.name, 80), &instance.status);
            output.line(format!("{:indent$}{}  {name} {status}", "", short(&instance.id, 200), indent = depth * 2));
            let mut children = below.remove(&instance.id).unwrap_or_default();
            children.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
            next.extend(children.into_iter().map(|child| (child, depth + 1)));
        }
        Ok(End::Done)
    }
}

/// An instance and all that descends from it.
pub async fn family(account: &Account, id: &str) -> anyhow::Result<Vec<InstanceSummary>> {
    let family = instance::family(&account.provider, &account.client, id, usize::MAX).await;
    family.map_err(|error| anyhow::anyhow!(error))
}

pub fn not_found(id: &str) -> End {
    End::NotFound(format!("there is no instance {id:?}, or no worker has taken up its start yet"))
}

#[derive(Args)]
pub struct Queues {
    /// Tries a message again that was not delivered: INSTANCE and INTENT as shown, or "all". Changes
    #[arg(long, num_args = 1..=2, value_names = ["INSTANCE", "INTENT"], conflicts_with = "drop")]
    retry: Option<Vec<String>>,
    /// Removes a message that was not delivered: its target never hears of it. Changes
    #[arg(long, num_args = 2, value_names = ["INSTANCE", "INTENT"])]
    drop: Option<Vec<String>>,
    /// Does not ask
    #[arg(long)]
    yes: bool,
}

impl Queues {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        match (&self.retry, &self.drop) {
            (Some(which), _) => self.retry(account, which, output).await,
            (None, Some(which)) => self.drop(account, which, output).await,
            (None, None) => report(account, output).await,
        }
    }

    async fn retry(&self, account: &Account, which: &[String], output: Output) -> Result {
        let which: Vec<(String, String)> = match which {
            [all] if all == "all" => {
                let late = account.provider.late_intents().await?;
                late.into_iter().map(|intent| (intent.instance, intent.id)).collect()
            }
            [instance, intent] => vec![(instance.clone(), intent.clone())],
            _ => anyhow::bail!("--retry takes an instance and an intent, or \"all\""),
        };
        let is_one = which.len() == 1;
        let mut failures = Vec::new();
        for (instance, intent) in which {
            let retried = match account.provider.retry_intent(&instance, &intent).await {
                Ok(retried) => retried,
                Err(error) => {
                    failures.push(format!("{intent} of {instance}: {error}"));
                    continue;
                }
            };
            if retried {
                output.object("retried", &json!({ "intent": intent, "instance": instance }));
                output.line(format!("{intent} of {instance} is tried again"));
            } else if is_one {
                return Ok(End::NotFound(format!("there is no message {intent} of {instance:?} any more")));
            }
            // Of several, one may have been delivered meanwhile.
        }
        ensure!(failures.is_empty(), "not tried again: {}", failures.join("; "));
        Ok(End::Done)
    }

    async fn drop(&self, account: &Account, which: &[String], output: Output) -> Result {
        let [instance, intent] = which else { anyhow::bail!("--drop takes an instance and an intent") };
        let late = account.provider.late_intents().await?;
        let found = late.iter().find(|other| other.instance == *instance && other.id == *intent);
        let Some(found) = found else {
            return Ok(End::NotFound(format!(
                "{intent} of {instance:?} is not among the messages that were not delivered"
            )));
        };
        let question = format!("{} for {} is lost for good. Remove it?", found.message, found.target);
        if !crate::delete::agreed(self.yes, &question, "try it again with --retry")? {
            return Ok(End::Declined);
        }
        ensure!(account.provider.drop_intent(instance, intent).await?, "it was delivered meanwhile");
        output.object("dropped", &json!({ "intent": intent, "instance": instance }));
        output.line(format!("{intent} of {instance} is removed"));
        Ok(End::Done)
    }
}

async fn report(account: &Account, output: Output) -> Result {
    let report = account.provider.queues().await?;
    let late = account.provider.late_intents().await?;
    let mut turns = json!(report.turns);
    (turns["queue"], turns["capped"]) = ("turns".into(), report.capped.into());
    output.object("queue", &turns);
    for queue in &report.activities {
        let mut object = json!(queue);
        (object["queue"], object["capped"]) = ("activities".into(), report.capped.into());
        output.object("queue", &object);
    }
    late.iter().for_each(|intent| output.object("intent", intent));
    let age = |since: Option<u64>| since.map(ago).unwrap_or_default();
    let named = |name: &Option<String>| name.clone().unwrap_or_default();
    let queue = &report.turns;
    let mut rows = vec![vec![
        "turns".to_owned(),
        String::new(),
        String::new(),
        queue.waiting.to_string(),
        String::new(),
        age(queue.oldest),
        named(&queue.oldest_instance),
    ]];
    rows.extend(report.activities.iter().map(|queue| {
        vec![
            "activities".to_owned(),
            named(&queue.tag),
            named(&queue.session),
            queue.waiting.to_string(),
            queue.running.to_string(),
            age(queue.oldest),
            named(&queue.oldest_instance),
        ]
    }));
    output.table(&["QUEUE", "TAG", "SESSION", "WAITING", "RUNNING", "OLDEST", "OF"], rows);
    let (later, parked) = (report.turns.later, report.turns.deferred);
    output.line(format!("\n{later} timers and messages for later, {parked} for instances that nobody has started"));
    if report.capped {
        output.line("there is more: these are the oldest thousand of each queue");
    }
    if !late.is_empty() {
        let row = |intent: &Intent| {
            let state = match &intent.state {
                IntentState::Poisoned { reason } => format!("can't be delivered: {}", short(reason, 120)),
                _ => format!("late, {} attempts", intent.attempts),
            };
            let (message, target) = (intent.message.clone(), intent.target.clone());
            vec![intent.instance.clone(), intent.id.clone(), message, target, ago(intent.created_at), state]
        };
        output.line("\nnot delivered:");
        output.table(&["OF", "INTENT", "MESSAGE", "FOR", "SENT", "STATE"], late.iter().map(row));
        output.line("\n--retry INSTANCE INTENT tries one again, --drop INSTANCE INTENT removes it");
    }
    Ok(End::Done)
}

/// Shows who is there.
pub async fn fleet(account: &Account, output: Output) -> Result {
    let members = account.provider.members().await?;
    members.iter().for_each(|member| output.object("member", member));
    let row = |member: &Member| {
        let turns = member.turns.as_ref().map(|stand| {
            let versions = stand.versions.as_ref().map(|(from, to)| format!(", duroxide {from} to {to}"));
            format!("slots {}{}", stand.slots, versions.unwrap_or_default())
        });
        let activities = member.activities.as_ref().map(|stand| {
            let untagged = (stand.untagged && !stand.any).then(|| "untagged".to_owned());
            let any = stand.any.then(|| "any tag".to_owned());
            let tags: Vec<String> = any.into_iter().chain(untagged).chain(stand.tags.iter().cloned()).collect();
            format!("slots {}, {}", stand.slots, tags.join(" "))
        });
        let idle = || "nobody waits".to_owned();
        vec![
            member.name.clone(),
            format!("{}{}", ago(member.last_heard), if member.alive { "" } else { ", gone" }),
            turns.unwrap_or_else(idle),
            activities.unwrap_or_else(idle),
            member.session_owners.join(" "),
        ]
    };
    output.table(&["MEMBER", "HEARD OF", "TURNS", "ACTIVITIES", "SESSIONS AS"], members.iter().map(row));
    if !members.iter().any(|member| member.alive) {
        output.line("no process looks for work");
    }
    Ok(End::Done)
}

/// When something was, for a heading.
pub fn when(millis: u64) -> String {
    format!("{} ({})", moment(millis), ago(millis))
}
