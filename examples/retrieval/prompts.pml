<prompt schema="handbook">
  <user><travel/><devices/>My laptop was left on the train last night. What must I do, and by when?</user>
</prompt>

<prompt schema="handbook">
  <user><illness/><holidays/>I had the flu during my holiday. Do I get the days back?</user>
</prompt>

<prompt schema="handbook">
  <user><visitors/><travel/><holidays/>How long may I keep days of holiday from last year?</user>
</prompt>
