<prompt schema="trip">
  <travellers who="a family with two children" budget="120 euros"/>
  <days count="four days" month="July"/>
  <coast><islands/></coast>
  <user>We start in Genoa. Where do we spend the first day?</user>
</prompt>

<prompt schema="trip">
  <travellers who="three friends"/>
  <days count="a week"/>
  <mountains><easy/></mountains>
  <user>We start in Innsbruck. Plan the first two days.</user>
</prompt>

<prompt schema="trip">
  <travellers/>
  <days count="five days" month="October"/>
  <cities/>
  <user>Which two cities would you choose, if we start in Vienna?</user>
</prompt>
