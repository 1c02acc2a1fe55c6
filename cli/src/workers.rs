//! `workers`: the processes that look for work.

use crate::{account::Account, output::Output, times::ago, Outcome, Result};
use duroxide_cosmos::operate::{ActivityCapabilities, Member, TurnCapabilities};

/// Prints one row for each process.
pub async fn run(account: &Account, output: Output) -> Result {
    let workers = account.provider.members().await?;
    workers.iter().for_each(|worker| output.object("worker", worker));
    output.table(&["WORKER", "LAST SEEN", "TURNS", "ACTIVITIES", "SESSION OWNERS"], workers.iter().map(row));
    if !workers.iter().any(|worker| worker.alive) {
        output.line("no process looks for work");
    }
    Ok(Outcome::Done)
}

fn row(worker: &Member) -> Vec<String> {
    let busy = || "no idle dispatcher".to_owned();
    vec![
        worker.name.clone(),
        format!("{}{}", ago(worker.last_heard), if worker.alive { "" } else { ", gone" }),
        worker.turns.as_ref().map_or_else(busy, describe_turns),
        worker.activities.as_ref().map_or_else(busy, describe_activities),
        worker.session_owners.join(" "),
    ]
}

fn describe_turns(turns: &TurnCapabilities) -> String {
    let versions = turns.versions.as_ref().map(|(from, to)| format!(", duroxide {from} to {to}"));
    format!("slots {}{}", turns.slots, versions.unwrap_or_default())
}

fn describe_activities(activities: &ActivityCapabilities) -> String {
    let any = activities.any.then(|| "any tag".to_owned());
    let untagged = (activities.untagged && !activities.any).then(|| "untagged".to_owned());
    let tags: Vec<String> = any.into_iter().chain(untagged).chain(activities.tags.iter().cloned()).collect();
    format!("slots {}, {}", activities.slots, tags.join(" "))
}
