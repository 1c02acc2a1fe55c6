//! What there is: the account, instances, families, queues, the fleet.

use crate::{
    account::Account,
    output::{short, Output},
    times::{ago, length, moment, now, parse_length},
    End, Result,
};
use anyhow::ensure;
use clap::{Args, ValueEnum};
use duroxide_cosmos::{
    operate::{self, InstanceQuery, InstanceSummary, Intent, IntentState, Member, Verdict},
    CosmosDBProviderConfig,
};
use serde_json::json;
use std::{collections::BTreeMap, time::Duration};

/// Says of each thing that must be right how it is.
pub async fn check(config: &CosmosDBProviderConfig, output: Output) -> Result {
    let checks = operate::check(config).await;
    for check in &checks {
        output.object(check);
        let how = match check.verdict {
            Verdict::Fine => "ok   ",
            Verdict::Poor => "poor ",
            _ => "WRONG",
        };
        output.line(format!("{how}  {:<14} {}", check.subject, check.detail));
    }
    let is_fine = checks.iter().all(|check| matches!(check.verdict, Verdict::Fine | Verdict::Poor));
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
    #[arg(long, value_name = "ORCHESTRATION")]
    pub name: Option<String>,
    /// The children of this instance
    #[arg(long, value_name = "ID")]
    pub parent: Option<String>,
    /// With this text in the id
    #[arg(long, value_name = "TEXT")]
    pub text: Option<String>,
    /// Created so long ago at most, as 15m, 2h, 7d
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    pub newer_than: Option<Duration>,
    /// Created so long ago at least
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    pub older_than: Option<Duration>,
}

impl Filter {
    pub fn query(&self) -> InstanceQuery {
        let back = |age: Duration| now().saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        let mut query = InstanceQuery::default();
        query.status = self.status.map(|status| status.as_str().to_owned());
        (query.name, query.parent, query.text) = (self.name.clone(), self.parent.clone(), self.text.clone());
        query.created_after = self.newer_than.map(back);
        query.created_before = self.older_than.map(back);
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
}

impl List {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let page =
            account.provider.instances(&self.filter.query(), self.cursor.as_deref(), usize::from(self.limit)).await?;
        page.instances.iter().for_each(|instance| output.object(instance));
        if let Some(cursor) = &page.cursor {
            output.object(&json!({ "cursor": cursor }));
        }
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
        output.table(&["STATUS", "CREATED", "TOOK", "ORCHESTRATION", "INSTANCE"], page.instances.iter().map(row));
        match (&page.cursor, page.instances.is_empty()) {
            (Some(cursor), _) => output.line(format!("\nthere are more: --cursor {cursor}")),
            (None, true) => output.line("no such instances"),
            _ => {}
        }
        Ok(End::Done)
    }
}

#[derive(Args)]
pub struct Tree {
    /// The instance
    id: String,
}

impl Tree {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Some(root) = summary(account, &self.id).await? else { return Ok(not_found(&self.id)) };
        let mut below: BTreeMap<String, Vec<InstanceSummary>> = BTreeMap::new();
        let mut parents = vec![root.id.clone()];
        while let Some(parent) = parents.pop() {
            let children = children(account, &parent).await?;
            parents.extend(children.iter().map(|child| child.id.clone()));
            below.insert(parent, children);
        }
        print_below(output, &below, &root, 0);
        Ok(End::Done)
    }
}

/// What a list says of one instance.
async fn summary(account: &Account, id: &str) -> anyhow::Result<Option<InstanceSummary>> {
    Ok(account.provider.instance(id).await?)
}

/// All children of an instance, oldest first.
async fn children(account: &Account, parent: &str) -> anyhow::Result<Vec<InstanceSummary>> {
    let mut query = InstanceQuery::default();
    query.parent = Some(parent.to_owned());
    let (mut children, mut cursor) = (Vec::new(), None);
    loop {
        let page = account.provider.instances(&query, cursor.as_deref(), 1_000).await?;
        children.extend(page.instances);
        cursor = page.cursor;
        if cursor.is_none() {
            children.reverse();
            return Ok(children);
        }
    }
}

fn print_below(output: Output, below: &BTreeMap<String, Vec<InstanceSummary>>, of: &InstanceSummary, depth: usize) {
    let mut object = json!(of);
    object["depth"] = depth.into();
    output.object(&object);
    let name = short(&of.id, 200);
    output.line(format!("{:indent$}{name}  {} {}", "", short(&of.name, 80), of.status, indent = depth * 2));
    for child in below.get(&of.id).into_iter().flatten() {
        print_below(output, below, child, depth + 1);
    }
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
        for (instance, intent) in which {
            if !account.provider.retry_intent(&instance, &intent).await? {
                return Ok(End::NotFound(format!("there is no message {intent} of {instance:?} any more")));
            }
            output.object(&json!({ "retried": intent, "instance": instance }));
            output.line(format!("{intent} of {instance} is tried again"));
        }
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
        if !crate::delete::agreed(self.yes, &question)? {
            return Ok(End::Declined);
        }
        ensure!(account.provider.drop_intent(instance, intent).await?, "it was delivered meanwhile");
        output.object(&json!({ "dropped": intent, "instance": instance }));
        output.line(format!("{intent} of {instance} is removed"));
        Ok(End::Done)
    }
}

async fn report(account: &Account, output: Output) -> Result {
    let report = account.provider.queues().await?;
    let late = account.provider.late_intents().await?;
    let mut turns = json!(report.turns);
    turns["queue"] = "turns".into();
    output.object(&turns);
    for queue in &report.activities {
        let mut object = json!(queue);
        object["queue"] = "activities".into();
        output.object(&object);
    }
    late.iter().for_each(|intent| output.object(intent));
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
    let (later, parked) = (report.turns.later, report.turns.parked);
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
    members.iter().for_each(|member| output.object(member));
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
            ago(member.last_heard),
            turns.unwrap_or_else(idle),
            activities.unwrap_or_else(idle),
            member.session_owners.join(" "),
        ]
    };
    output.table(&["MEMBER", "HEARD OF", "TURNS", "ACTIVITIES", "SESSIONS AS"], members.iter().map(row));
    if members.is_empty() {
        output.line("no process looks for work");
    }
    Ok(End::Done)
}

/// When something was, for a heading.
pub fn when(millis: u64) -> String {
    format!("{} ({})", moment(millis), ago(millis))
}
