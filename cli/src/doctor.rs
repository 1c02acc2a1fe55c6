//! What is wrong, and mending it.

use crate::{
    account::Account,
    delete::agreed,
    look::not_found,
    output::{plain, print_error, Output},
    times::{ago, parse_length},
    End, Result,
};
use clap::Args;
use duroxide_cosmos::operate::{self, Diagnosis, Finding, Remedy};
use futures::{stream, StreamExt};
use indicatif::ProgressBar;
use serde_json::json;
use std::time::Duration;

/// So many instances are looked at at once.
const AT_ONCE: usize = 8;

#[derive(Args)]
pub struct Doctor {
    /// The instances; with none, those that run and have not moved for a while, and those of which something waits that nobody takes
    ids: Vec<String>,
    /// What a while is
    #[arg(long, value_name = "LENGTH", value_parser = parse_length, default_value = "10m", conflicts_with = "all")]
    unmoved: Duration,
    /// Every instance, and whatever has a history: looks at the whole container
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// Mends what can be mended from the history, after it has said what it will do. Changes
    #[arg(long)]
    repair: bool,
    /// Does not ask
    #[arg(long, requires = "repair")]
    yes: bool,
}

/// What has been seen.
#[derive(Default)]
struct Round {
    looked: usize,
    /// Those of which something is wrong.
    ill: Vec<Diagnosis>,
    failures: usize,
    /// The first that there is nothing of.
    unknown: Option<String>,
}

impl Doctor {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let doctor = account.provider.doctor().await?;
        let mut round = Round::default();
        if self.ids.is_empty() {
            let bar = ProgressBar::new_spinner();
            let mut suspects = doctor.scan(self.unmoved, self.all);
            while let Some(page) = suspects.next().await? {
                look_at(&doctor, page, &mut round, &bar, output).await;
            }
            bar.finish_and_clear();
        } else {
            for id in &self.ids {
                // Of several, the others are looked at all the same.
                let diagnosis = match doctor.diagnose(id).await {
                    Ok(Some(diagnosis)) => diagnosis,
                    Ok(None) => {
                        round.unknown.get_or_insert_with(|| id.clone());
                        continue;
                    }
                    Err(error) => {
                        round.failures += 1;
                        print_error(&not_looked_at(id, &error));
                        continue;
                    }
                };
                round.looked += 1;
                tell(&diagnosis, output);
                if !diagnosis.findings.is_empty() {
                    round.ill.push(diagnosis);
                }
            }
        }
        let Round { looked, ill, failures, unknown } = round;
        let mendable =
            ill.iter().flat_map(|diagnosis| &diagnosis.findings).filter(|finding| is_mendable(finding)).count();
        output.line(format!("looked at {looked} instances: {} with something wrong", ill.len()));
        if self.repair && mendable > 0 {
            let instances = ill.iter().filter(|diagnosis| diagnosis.can_be_repaired()).count();
            if !agreed(
                self.yes,
                &format!("Do what is said after \"repair\", {mendable} things of {instances} instances?"),
                "leave --repair out",
            )? {
                return Ok(End::Declined);
            }
            let is_well = mend(&doctor, ill, output).await;
            return Ok(match unknown {
                Some(id) => not_found(&id),
                None if is_well && failures == 0 => End::Done,
                None => End::Wrong,
            });
        }
        if mendable > 0 {
            output.line(format!("--repair mends {mendable} of what was found"));
        }
        Ok(match unknown {
            Some(id) => not_found(&id),
            None if ill.is_empty() && failures == 0 => End::Done,
            None => End::Wrong,
        })
    }
}

fn is_mendable(finding: &Finding) -> bool {
    matches!(finding.remedy, Remedy::Repair(_))
}

async fn look_at(doctor: &operate::Doctor, page: Vec<String>, round: &mut Round, bar: &ProgressBar, output: Output) {
    let mut looking = stream::iter(page)
        .map(|id| async move {
            let diagnosis = doctor.diagnose(&id).await;
            (id, diagnosis)
        })
        .buffer_unordered(AT_ONCE);
    while let Some((id, diagnosis)) = looking.next().await {
        round.looked += 1;
        bar.set_message(format!("looked at {}", round.looked));
        bar.tick();
        match diagnosis {
            // It was deleted meanwhile.
            Ok(None) => {}
            Ok(Some(diagnosis)) if diagnosis.findings.is_empty() => {}
            Ok(Some(diagnosis)) => {
                bar.suspend(|| tell(&diagnosis, output));
                round.ill.push(diagnosis);
            }
            // The others are looked at all the same.
            Err(error) => {
                round.failures += 1;
                bar.suspend(|| print_error(&not_looked_at(&id, &error)));
            }
        }
    }
}

fn not_looked_at(id: &str, error: &impl ToString) -> String {
    format!("{} could not be looked at: {}", plain(id), plain(&error.to_string()))
}

/// Shows what is known of an instance.
fn tell(diagnosis: &Diagnosis, output: Output) {
    output.object("diagnosis", diagnosis);
    let Diagnosis { instance, name, status, updated_at, state, findings, .. } = diagnosis;
    let known = [
        Some(name.clone()).filter(|name| !name.is_empty()),
        status.clone(),
        updated_at.map(|at| format!("moved {}", ago(at))),
    ];
    let known: Vec<String> = known.into_iter().flatten().collect();
    let known = if known.is_empty() { String::new() } else { format!(" ({})", known.join(", ")) };
    let well = if findings.is_empty() && !diagnosis.moves { "; nothing is wrong" } else { "" };
    output.line(plain(&format!("{instance}{known}: {state}{well}")));
    for finding in findings {
        output.line(plain(&format!("  {}: {}", finding.reason, finding.detail)));
        output.line(plain(&match &finding.remedy {
            Remedy::Repair(does) => format!("    repair: {does}"),
            Remedy::ByHand(todo) => format!("    by hand: {todo}"),
            _ => String::new(),
        }));
    }
}

/// Whether all of them are well after it.
async fn mend(doctor: &operate::Doctor, ill: Vec<Diagnosis>, output: Output) -> bool {
    let (mut is_well, mut count) = (true, 0);
    for diagnosis in ill {
        if !diagnosis.can_be_repaired() {
            is_well = false;
            continue;
        }
        let instance = &diagnosis.instance;
        let repair = match doctor.repair(&diagnosis).await {
            Ok(repair) => repair,
            Err(error) => {
                print_error(&format!("{} is not mended: {}", plain(instance), plain(&error.to_string())));
                is_well = false;
                continue;
            }
        };
        count += repair.done.len();
        let left = repair.after.as_ref().map_or(&[][..], |after| &after.findings);
        output.object(
            "repair",
            &json!({ "instance": instance, "done": repair.done, "hindered": repair.hindered, "left": left }),
        );
        for finding in &repair.done {
            output.line(plain(&format!("{instance}: mended: {}", finding.detail)));
        }
        if let Some(why) = &repair.hindered {
            output.line(plain(&format!("{instance}: not mended: {why}")));
        }
        for finding in left {
            output.line(plain(&format!("{instance}: still {}: {}", finding.reason, finding.detail)));
        }
        is_well &= left.is_empty() && repair.hindered.is_none();
    }
    output.line(format!("mended {count}"));
    is_well
}
