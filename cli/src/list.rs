//! `list`: pages of instances, newest first.

use crate::{
    account::Account,
    filter::Filter,
    instances::PAGE,
    output::{escape, is_reader_gone, Output},
    times::{ago, length},
    Outcome, Result,
};
use clap::Args;
use duroxide_cosmos::operate::{InstancePage, InstanceQuery, InstanceSummary};
use serde_json::json;

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    filter: Filter,
    /// At most this many instances
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
    /// Continues a list; the previous page prints the cursor
    #[arg(long)]
    cursor: Option<String>,
    /// All pages
    #[arg(long, conflicts_with_all = ["limit", "cursor"])]
    all: bool,
}

impl List {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let query = self.filter.query();
        if self.all {
            return list_all(account, &query, output).await;
        }
        let page = account.provider.instances(&query, self.cursor.as_deref(), usize::from(self.limit)).await?;
        print_page(&page, output);
        if let Some(cursor) = &page.cursor {
            output.object("cursor", &json!({ "cursor": cursor }));
        }
        match (&page.cursor, page.instances.is_empty() && page.unreadable.is_empty()) {
            (Some(cursor), _) => output.line(format!("\nthere are more: --cursor {cursor}, or --all")),
            (None, true) => output.line("no such instances"),
            _ => {}
        }
        Ok(Outcome::Done)
    }
}

async fn list_all(account: &Account, query: &InstanceQuery, output: Output) -> Result {
    let mut cursor = None;
    loop {
        let page = account.provider.instances(query, cursor.as_deref(), PAGE).await?;
        print_page(&page, output);
        cursor = page.cursor;
        if cursor.is_none() || is_reader_gone() {
            return Ok(Outcome::Done);
        }
    }
}

fn print_page(page: &InstancePage, output: Output) {
    for unreadable in &page.unreadable {
        output.object("unreadable", unreadable);
        output.line(escape(&format!("{} can't be read by this version: {}", unreadable.id, unreadable.error)));
    }
    let instances = &page.instances;
    instances.iter().for_each(|instance| output.object("instance", instance));
    if !instances.is_empty() {
        output.table(&["STATUS", "CREATED", "TOOK", "ORCHESTRATION", "INSTANCE"], instances.iter().map(row));
    }
}

fn row(instance: &InstanceSummary) -> Vec<String> {
    let took = instance.completed_at.map(|end| length(end.saturating_sub(instance.created_at)));
    vec![
        instance.status.clone(),
        ago(instance.created_at),
        took.unwrap_or_default(),
        instance.name.clone(),
        instance.id.clone(),
    ]
}
