//! A bank. Accounts are orchestrations that take transfers from their queues, pay each other by activities that put messages
//! into the other's queue, and continue as new. Whatever happens, the money is all there when they close.

use std::collections::BTreeSet;
use std::time::Duration;

use duroxide::{ActivityContext, OrchestrationContext};
use serde::{Deserialize, Serialize};

use crate::dice::Dice;
use crate::script::QUEUE;

/// The name of the orchestration that is an account.
pub const ACCOUNT: &str = "Account";
/// The name of the activity that pays into another account.
pub const PAY: &str = "Pay";
/// Messages that an execution takes before it continues as new.
const A_PAGE: usize = 6;

/// What an account has in the beginning: more than it can be asked for.
pub const OPENING_BALANCE: i64 = 1_000;

/// What clients want of the bank.
#[derive(Clone, Debug)]
pub struct Business {
    /// What the names of its accounts begin with: no two banks share one.
    pub prefix: String,
    /// How many accounts there are.
    pub accounts: usize,
    /// Who pays whom how much; a transfer's number is its place here.
    pub transfers: Vec<Transfer>,
}

/// One transfer.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Who pays.
    pub from: usize,
    /// Who is paid.
    pub to: usize,
    /// How much.
    pub amount: i64,
}

impl Business {
    /// Draws some.
    pub fn draw(dice: &mut Dice, accounts: usize, transfers: usize) -> Self {
        let some = |dice: &mut Dice| usize::try_from(dice.among(0..=accounts as u64 - 1)).unwrap_or(0);
        let transfers = (0..transfers).map(|_| {
            let from = some(dice);
            let to = (from + 1 + some(dice) % (accounts - 1).max(1)) % accounts;
            Transfer { from, to, amount: i64::try_from(dice.among(1..=9)).unwrap_or(1) }
        });
        Self { prefix: String::new(), accounts, transfers: transfers.collect() }
    }

    /// The instance that is an account.
    pub fn instance(&self, account: usize) -> String {
        format!("{}account {account}", self.prefix)
    }

    /// What an account must know to close: how many transfers it sends and how many it gets.
    pub fn closing(&self, account: usize) -> Message {
        let count = |chosen: &dyn Fn(&Transfer) -> bool| self.transfers.iter().filter(|t| chosen(t)).count();
        Message::Close { sent: count(&|t| t.from == account), received: count(&|t| t.to == account) }
    }

    /// What an account ends with.
    pub fn balance(&self, account: usize) -> i64 {
        self.transfers.iter().fold(OPENING_BALANCE, |balance, transfer| {
            let paid = if transfer.from == account { transfer.amount } else { 0 };
            let got = if transfer.to == account { transfer.amount } else { 0 };
            balance - paid + got
        })
    }
}

/// A message to an account, as it is in the queue: no two have the same nonce.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Letter {
    /// Unique to one call that put it there.
    pub nonce: u64,
    /// What it says.
    pub message: Message,
}

/// What an account is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Message {
    /// Pay.
    Transfer {
        /// The transfer's number.
        number: usize,
        /// The instance to pay to.
        to: String,
        /// How much.
        amount: i64,
    },
    /// Somebody has paid.
    Credit {
        /// The transfer's number.
        number: usize,
        /// How much.
        amount: i64,
    },
    /// End once this many transfers were sent and received.
    Close {
        /// Sent.
        sent: usize,
        /// Received.
        received: usize,
    },
}

/// What an account knows.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Book {
    balance: i64,
    sent: BTreeSet<usize>,
    received: BTreeSet<usize>,
    nonces: BTreeSet<u64>,
    close: Option<(usize, usize)>,
}

impl Book {
    /// A new account's, as the orchestration's input.
    pub fn opening() -> String {
        let book = Self { balance: OPENING_BALANCE, ..Self::default() };
        serde_json::to_string(&book).expect("a book is plain data")
    }

    fn is_closed(&self) -> bool {
        self.close.is_some_and(|(sent, received)| self.sent.len() == sent && self.received.len() == received)
    }
}

/// An account. Its output is its balance.
pub async fn account(context: OrchestrationContext, input: String) -> Result<String, String> {
    let mut book: Book = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    for _ in 0..A_PAGE {
        if book.is_closed() {
            return Ok(book.balance.to_string());
        }
        let letter = context.dequeue_event(QUEUE).await;
        let letter: Letter = serde_json::from_str(&letter).map_err(|error| error.to_string())?;
        if !book.nonces.insert(letter.nonce) {
            return Err(format!("letter {letter:?} came twice"));
        }
        match letter.message {
            Message::Transfer { number, to, amount } => {
                if book.sent.insert(number) {
                    book.balance -= amount;
                    pay(&context, &to, number, amount).await;
                }
            }
            // The activity that pays may run twice.
            Message::Credit { number, amount } => {
                if book.received.insert(number) {
                    book.balance += amount;
                }
            }
            Message::Close { sent, received } => book.close = Some((sent, received)),
        }
    }
    if book.is_closed() {
        return Ok(book.balance.to_string());
    }
    let book = serde_json::to_string(&book).map_err(|error| error.to_string())?;
    context.continue_as_new(book).await
}

/// Pays, however often that takes.
async fn pay(context: &OrchestrationContext, to: &str, number: usize, amount: i64) {
    let input = serde_json::json!({ "to": to, "number": number, "amount": amount }).to_string();
    while context.schedule_activity(PAY, input.as_str()).await.is_err() {
        context.schedule_timer(Duration::from_millis(500)).await;
    }
}

/// The activity that puts money into the other account's queue.
pub async fn pay_in(context: ActivityContext, input: String) -> Result<String, String> {
    let input: serde_json::Value = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let to = input["to"].as_str().unwrap_or_default();
    let message = Message::Credit {
        number: usize::try_from(input["number"].as_u64().unwrap_or(0)).unwrap_or(0),
        amount: input["amount"].as_i64().unwrap_or(0),
    };
    let letter = Letter { nonce: fastrand::u64(..1 << 50), message };
    let letter = serde_json::to_string(&letter).map_err(|error| error.to_string())?;
    context.get_client().enqueue_event(to, QUEUE, letter).await.map_err(|error| error.to_string())?;
    Ok(String::new())
}
